// Dates on axes.
export const timeFormat = () => String;
export const utcFormat = timeFormat;
