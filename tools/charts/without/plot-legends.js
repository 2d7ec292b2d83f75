// Legends: those of the pages are HTML, as they have buttons.
export const createLegends = () => [];
export const exposeLegends = () => undefined;
export const legend = undefined;
