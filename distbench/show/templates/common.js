"use strict";
const byId = (id) => document.getElementById(id);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];
const element = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};
const slug = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 80) || "row";
// `name`, or `name-2`, `name-3`, ... where it is taken.
const unique = (name, taken) => {
  let free = name;
  for (let number = 2; taken.has(free); number += 1) free = `${name}-${number}`;
  taken.add(free);
  return free;
};

const save = (name, type, text) => {
  const address = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
};
const copy = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A browser may keep the clipboard from a page that is a file; the older way asks for nothing.
    const box = element("textarea", { value: text });
    document.body.append(box);
    box.select();
    const isCopied = document.execCommand("copy");
    box.remove();
    if (!isCopied) throw new Error("the browser does not allow copying");
  }
};
// A button that shows for a moment how its action ended.
const actionButton = (label, name, action, done) => {
  const button = element("button", { type: "button", textContent: label, ariaLabel: name, ariaLive: "polite" });
  button.addEventListener("click", async () => {
    try {
      await action();
      button.textContent = done;
    } catch {
      button.textContent = "Failed";
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
};
