// The keyboard reaches all that scrolls, and every part of the page has a name of its own.
addEventListener("load", () => {
  document.querySelectorAll(".md-typeset__scrollwrap, pre > code").forEach((part) => (part.tabIndex = 0));
  document.querySelectorAll("p > img:only-child").forEach((part) => (part.parentElement.tabIndex = 0));
  document.querySelectorAll(".md-search").forEach((part) => part.setAttribute("aria-label", "Search"));
  document.querySelectorAll(".md-code__nav").forEach((part, n) => part.setAttribute("aria-label", `Code ${n + 1}`));
  document.querySelectorAll(".md-nav__container + nav").forEach((part) => {
    part.setAttribute("aria-label", part.previousElementSibling.textContent.trim());
  });
});
