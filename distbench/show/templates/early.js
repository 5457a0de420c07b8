"use strict";
// Before anything is painted, so that nothing flashes: the reader's theme, and that a script runs at all.
document.documentElement.classList.add("js");
try {
  const kept = localStorage.getItem("distbench-theme");
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
} catch { /* a page may be kept from storage */ }
