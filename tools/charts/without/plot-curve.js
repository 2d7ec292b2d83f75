// Curved lines.
import { curveLinear } from "d3";

export const curveAuto = curveLinear;
export const maybeCurve = () => curveLinear;
export const maybeCurveAuto = maybeCurve;
