// The page itself: contents, folding, theme, and everything open on paper.
const entries = byId("entries");
const opened = byId("contents");
const openContents = (isOpen) => {
  entries.classList.toggle("open", isOpen);
  opened.ariaExpanded = String(isOpen);
};
opened.addEventListener("click", () => openContents(!entries.classList.contains("open")));
entries.addEventListener("click", (event) => event.target.closest("a") && openContents(false));

const sections = all("details.section");
const fold = byId("fold");
fold.addEventListener("click", () => {
  const isOpen = sections.every((section) => !section.open);
  for (const section of sections) section.open = isOpen;
});
const sayFold = () => { fold.textContent = sections.some((section) => section.open) ? "Fold all" : "Open all"; };
for (const section of sections) section.addEventListener("toggle", sayFold);

const theme = byId("theme");
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
const sayTheme = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
theme.addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  try { localStorage.setItem("distbench-theme", document.documentElement.dataset.theme); } catch { /* not kept */ }
  sayTheme();
});
prefersDark.addEventListener("change", sayTheme);
sayTheme();

let folded = [];
addEventListener("beforeprint", () => {
  folded = sections.filter((section) => !section.open);
  for (const section of folded) section.open = true;
});
addEventListener("afterprint", () => { for (const section of folded) section.open = false; });

const current = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    entries.querySelector(`a[href="#${target.id}"]`)?.classList.toggle("seen", isIntersecting);
  }
}, { rootMargin: "-10% 0px -60% 0px" });
for (const section of sections) current.observe(section);
