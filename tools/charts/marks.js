// The parts of Observable Plot that the pages use. A mark that is added here is in the bundle after the next build.
export { areaY, cell, dot, frame, gridY, line, plot, pointer, pointerX, pointerY, rectX, rectY, ruleX, ruleY, text } from "@observablehq/plot";
