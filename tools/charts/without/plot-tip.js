// Tooltips inside of the SVG: those of the pages are HTML, as they list several lines and must fit a phone.
export const tip = undefined;
export const Tip = undefined;
