/* global Plot, computeAxisRange, createChart, filledMarker, formatNumber, hollowMarker, shortenName */
/**
 * The kinds of charts, as marks of Observable Plot. Each function gets the available width and returns an SVG element.
 *
 * @typedef {Object} Line A line of `lineChart`: the mean of several seeds in a band from the smallest to the largest.
 * @property {LineStyle} style
 * @property {number} [seeds] - Number of seeds; a single one has no band.
 * @property {number[]} x
 * @property {number[]} mean
 * @property {number[]} low
 * @property {number[]} high
 * @property {boolean} [hasErrorBars] - Whether `low` and `high` are drawn as bars.
 * @property {boolean} [marksAllPoints] - Whether every point has a marker, and not only about seven.
 * @property {{x: number, mean: number, deviation: ?number}[]} [published] - Results of the paper, as hollow markers.
 *
 * @typedef {Object} ClassValues Values of `classChart`, one for each class.
 * @property {LineStyle} style
 * @property {number[]} mean
 * @property {number[]} [low]
 * @property {number[]} [high]
 */

const LINE_CHART_HEIGHT = 290;
const BOTTOM_MARGIN = 40; // has the numbers and the label of the x axis
const WIDE_BOTTOM_MARGIN = 44;
const RIGHT_MARGIN = 14;
const LETTER_WIDTH = 6.7; // mean width of a letter in pixels
const NARROW_CHART_WIDTH = 420; // charts up to this width have fewer ticks
const MIN_MATRIX_WIDTH = 330; // a narrower chart would cut the label below it

const GRID_LINE = { stroke: "var(--grid)", strokeOpacity: 1 };
const NUMBER_AXIS = { label: null, tickSize: 0, grid: false, ticks: 5 };
const GUIDE = { className: "guide", ariaHidden: "true" }; // `createChart` gets its tooltip from this mark
const GUIDE_LINE = { ...GUIDE, stroke: "var(--line)", strokeDasharray: "2 3", maxRadius: Infinity };

/** Options of Plot for the label of the x axis, at the lower edge of the bottom margin. */
function labelBelow(label, marginBottom) {
  return { label, labelAnchor: "center", labelArrow: "none", labelOffset: marginBottom - 5 };
}

/** Compute the left margin that the numbers of a y axis need, in pixels. */
function computeLeftMargin([low, high]) {
  const decimals = Math.max(0, Math.ceil(-Math.log10((high - low) / 5)));
  const integerLength = high >= 10000 ? 4 : Math.max(formatNumber(low, 0).length, formatNumber(high, 0).length);
  const length = integerLength + (decimals ? decimals + 1 : 0);
  return 16 + LETTER_WIDTH * length;
}

/** Choose the format of an axis' numbers: compact for large ones, otherwise the default of Plot. */
function chooseTickFormat([low, high]) {
  return Math.max(Math.abs(low), Math.abs(high)) >= 10000 ? (value) => formatNumber(value) : undefined;
}

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const indicesOf = (items) => items.map((_, index) => index);

// Lines

/**
 * Draw lines over a number.
 *
 * @param {number} width - In pixels.
 * @param {Object} options
 * @param {Line[]} options.lines
 * @param {string} options.title
 * @param {string} options.xLabel
 * @param {boolean} [options.percent] - Whether y is in percent.
 * @param {number} [options.lowest] - Lower limit of the y axis.
 * @param {number} [options.highest] - Upper limit of the y axis, if it is not in percent.
 * @param {boolean} [options.hasIntegerX] - Whether x has whole numbers, which then have the ticks.
 * @param {boolean} [options.hasTicksAtPoints] - Whether the ticks of x are at the points, if these are few.
 * @param {number} [options.height] - In pixels; if it is given, the chart is low and has fewer ticks.
 * @returns {SVGElement}
 */
function lineChart(width, options) {
  const { lines, title, xLabel, height = LINE_CHART_HEIGHT } = options;
  const published = lines.flatMap((line) => line.published ?? []);
  const xValues = [...new Set([...lines.flatMap((line) => line.x), ...published.map((point) => point.x)])];
  xValues.sort((a, b) => a - b);
  const xRange = computeXRange(xValues, options);
  const yRange = computeYRange(lines, published, options);
  const yTicks = options.height ? 3 : 5;
  const endTexts = lines
    .filter((line) => line.mean.length)
    .map((line) => `${line.style.title} ends at ${formatNumber(line.mean.at(-1))}`);
  // The tooltip shows the points of lines within this distance from the guide.
  const reach = (xValues.at(-1) - xValues[0]) / 40;
  const plotOptions = {
    width,
    height,
    marginLeft: computeLeftMargin(yRange),
    marginRight: RIGHT_MARGIN,
    marginTop: 8,
    marginBottom: BOTTOM_MARGIN,
    x: {
      type: "linear",
      domain: xRange,
      ...labelBelow(xLabel, BOTTOM_MARGIN),
      ...chooseXTicks(width, xValues, xRange, options),
    },
    y: { type: "linear", domain: yRange, ...NUMBER_AXIS, ticks: yTicks, tickFormat: chooseTickFormat(yRange) },
    marks: [
      Plot.gridY({ ...GRID_LINE, ticks: yTicks }),
      Plot.ruleY([yRange[0]], { stroke: "var(--line)" }),
      lines.map((line, index) => createLineMarks(line, index, lines.length)),
      Plot.ruleX(
        xValues.map((x) => ({ x })),
        Plot.pointerX({ ...GUIDE_LINE, x: "x" }),
      ),
    ],
  };
  return createChart(
    plotOptions,
    `${title}, against ${xLabel}: ${endTexts.join("; ") || "no line is shown"}.`,
    ({ x }) => [`${xLabel} ${formatNumber(x)}`, listTooltipRows(lines, x, reach)],
    (getScale) => xValues.map((x) => [getScale("x").apply(x), height / 3]),
  );
}

function computeXRange(xValues, { hasTicksAtPoints }) {
  let [low, high] = xValues.length ? [xValues[0], xValues.at(-1)] : [0, 1];
  if (low === high) {
    low -= 1;
    high += 1;
  }
  const margin = hasTicksAtPoints ? 0.03 * (high - low) : 0;
  return [low - margin, high + margin];
}

function computeYRange(lines, published, { percent, lowest = 0, highest = 1 }) {
  const publishedEnds = published.flatMap(({ mean, deviation }) => [mean - (deviation ?? 0), mean + (deviation ?? 0)]);
  const values = [...lines.flatMap((line) => [...line.low, ...line.high]), ...publishedEnds].filter(Number.isFinite);
  if (!values.length) {
    return [0, 1];
  }
  return computeAxisRange(values, percent ? 4 : 0.02, lowest, percent ? 100 : highest);
}

/** Choose ticks and tick format of the x axis: at the points if they are few, otherwise as Plot does. */
function chooseXTicks(width, xValues, xRange, { hasTicksAtPoints, hasIntegerX }) {
  const maxTicks = width > NARROW_CHART_WIDTH ? 7 : 4;
  if (hasTicksAtPoints && xValues.length > 1 && xValues.length <= maxTicks + 3) {
    const tickFormat = (value) => (Math.abs(value) < 10000 ? String(value) : formatNumber(value));
    return { ticks: xValues, tickFormat };
  }
  const span = Math.floor(xRange[1] - xRange[0]);
  const ticks = hasIntegerX ? Math.max(1, Math.min(maxTicks, span)) : maxTicks;
  return { ticks, tickFormat: chooseTickFormat(xRange) };
}

/** Create the marks of a line: band, error bars, line, markers, and published results. */
function createLineMarks(line, lineIndex, lineCount) {
  const { style } = line;
  const points = line.x.map((x, index) => ({
    x,
    mean: line.mean[index],
    low: line.low[index],
    high: line.high[index],
  }));
  // Markers of neighbors are at different places, so that none hides another.
  const markerStep = line.marksAllPoints ? 1 : Math.max(1, Math.floor(points.length / 7));
  const firstMarker = Math.floor((lineIndex * markerStep) / Math.max(1, lineCount)) % markerStep;
  const published = line.published ?? [];
  const range = { x: "x", y1: "low", y2: "high" };
  return [
    line.seeds > 1 ? Plot.areaY(points, { className: "band", ...range, fill: style.color, fillOpacity: 0.13 }) : null,
    line.hasErrorBars ? Plot.ruleX(points, { ...range, stroke: style.color, strokeOpacity: 0.5 }) : null,
    Plot.line(points, {
      className: "line",
      ariaLabel: () => style.title,
      x: "x",
      y: "mean",
      stroke: style.color,
      strokeWidth: 2,
      strokeLinecap: "butt",
      strokeDasharray: style.dashes || undefined,
    }),
    Plot.dot(
      points.filter((_, index) => index % markerStep === firstMarker),
      { className: "marker", x: "x", y: "mean", ...filledMarker(style, 3.8) },
    ),
    Plot.ruleX(published, {
      x: "x",
      y1: ({ mean, deviation }) => mean - deviation,
      y2: ({ mean, deviation }) => mean + deviation,
      stroke: style.color,
      strokeWidth: 1.4,
    }),
    Plot.dot(published, { className: "published", x: "x", y: "mean", ...hollowMarker(style, 4.6) }),
  ];
}

/** List the rows of a tooltip: the value of each line at the point that is nearest to x, the largest first. */
function listTooltipRows(lines, x, reach) {
  const entries = lines.flatMap((line) => findValuesNear(line, x, reach));
  entries.sort((a, b) => b.value - a.value);
  return entries.map(({ row }) => row);
}

/**
 * Find the mean of a line near x, and its published result at x.
 *
 * @returns {{row: TooltipRow, value: number}[]} At most one of each.
 */
function findValuesNear(line, x, reach) {
  const { color, title } = line.style;
  const entries = [];
  if (line.x.length) {
    const distanceTo = (index) => Math.abs(line.x[index] - x);
    const nearest = indicesOf(line.x).reduce((best, index) => (distanceTo(index) < distanceTo(best) ? index : best));
    if (distanceTo(nearest) <= reach) {
      const value = line.mean[nearest];
      const low = formatNumber(line.low[nearest], 2);
      const high = formatNumber(line.high[nearest], 2);
      const band = line.seeds > 1 ? ` (${low} to ${high})` : "";
      entries.push({ row: [color, title, formatNumber(value, 2) + band], value });
    }
  }
  for (const point of line.published ?? []) {
    if (point.x === x) {
      const deviation = point.deviation ? ` \u00b1 ${formatNumber(point.deviation, 2)}` : "";
      const row = [color, `${title}, published`, formatNumber(point.mean, 2) + deviation];
      entries.push({ row, value: point.mean });
    }
  }
  return entries;
}

// Classes

/**
 * Create an axis of names. Names that do not fit next to each other are slanted, and some are left out.
 *
 * @param {string[]} names
 * @param {number} length - Length of the axis in pixels.
 * @returns {{axis: Object, slantHeight: number}} Options of Plot for a scale of indices, and the additional height of
 *   slanted names in pixels.
 */
function createNameAxis(names, length) {
  const longest = Math.max(...names.map((name) => shortenName(name).length), 1);
  const fits = names.length * (6.8 * longest + 6) <= length;
  const step = fits ? 1 : Math.max(1, Math.ceil((names.length * 15) / length));
  const axis = {
    domain: indicesOf(names),
    ticks: indicesOf(names).filter((index) => index % step === 0),
    tickFormat: (index) => shortenName(names[index]),
    tickSize: 0,
  };
  if (!fits) {
    axis.tickRotate = -38;
  }
  return { axis, slantHeight: fits ? 0 : 4.4 * longest };
}

/**
 * Draw dots over classes; those of several methods are next to each other.
 *
 * @param {number} width - In pixels.
 * @param {Object} options
 * @param {ClassValues[]} options.sets - Values of each method, in percent.
 * @param {string[]} options.classes - Names of the classes.
 * @param {string} options.title
 * @param {string} options.xLabel
 * @param {boolean} [options.showsWholeRange] - Whether the y axis ends at 100 %, and not at the largest value.
 * @returns {SVGElement}
 */
function classChart(width, { sets, classes, title, xLabel, showsWholeRange }) {
  const largest = Math.max(...sets.flatMap((set) => set.high ?? set.mean), 1);
  const yRange = [0, showsWholeRange ? 100 : Math.min(100, largest * 1.06)];
  const marginLeft = computeLeftMargin(yRange);
  const axisLength = width - marginLeft - RIGHT_MARGIN;
  const { axis, slantHeight } = createNameAxis(classes, axisLength);
  const marginBottom = BOTTOM_MARGIN + slantHeight;
  const classWidth = axisLength / classes.length;
  const groupWidth = Math.min(0.8, 0.13 * sets.length) * classWidth; // of the dots of a class
  const radius = classes.length > 40 ? 2.4 : 3.8;

  const createSetMarks = ({ style, mean, low, high }, setIndex) => {
    const points = mean.map((value, index) => ({
      index,
      mean: value,
      low: low?.[index] ?? 0,
      high: high?.[index] ?? value,
    }));
    const dx = sets.length > 1 ? (setIndex / (sets.length - 1) - 0.5) * groupWidth : 0;
    const range = { x: "index", y1: "low", y2: "high", dx };
    return [
      Plot.ruleX(points, { ...range, stroke: style.color, strokeWidth: 1.4, strokeOpacity: 0.55 }),
      Plot.dot(points, {
        className: "marker",
        ariaLabel: () => style.title,
        x: "index",
        y: "mean",
        dx,
        ...filledMarker(style, radius),
      }),
    ];
  };

  const positions = indicesOf(classes).map((index) => ({ index }));
  const guide = { ...GUIDE, x: "index", fill: "currentColor", fillOpacity: 0.08, maxRadius: Infinity };
  const plotOptions = {
    width,
    height: LINE_CHART_HEIGHT,
    marginLeft,
    marginRight: RIGHT_MARGIN,
    marginTop: 8,
    marginBottom,
    x: { type: "band", padding: 0, ...axis, ...labelBelow(xLabel, marginBottom) },
    y: { type: "linear", domain: yRange, ...NUMBER_AXIS },
    marks: [
      Plot.gridY({ ...GRID_LINE, ticks: 5 }),
      Plot.ruleY([0], { stroke: "var(--line)" }),
      Plot.cell(positions, Plot.pointerX(guide)),
      sets.map(createSetMarks),
    ],
  };
  const rangeTexts = sets.map(({ style, mean }) => {
    const low = formatNumber(Math.min(...mean), 1);
    return `${style.title} ${low} to ${formatNumber(Math.max(...mean), 1)} %`;
  });
  return createChart(
    plotOptions,
    `${title}, by class: ${rangeTexts.join("; ")}`,
    ({ index }) => [
      classes[index],
      sets.map(({ style, mean }) => [style.color, style.title, `${formatNumber(mean[index], 2)} %`]),
    ],
    (getScale) => positions.map(({ index }) => [getScale("x").apply(index) + classWidth / 2, LINE_CHART_HEIGHT / 3]),
  );
}

// Confusions

/** Labels of the axis of a confusion matrix, the longest first. */
const MATRIX_LABELS = [
  "predicted class (rows: true class), % of the row",
  "predicted class, % of the row",
  "predicted class",
];

/**
 * Draw a confusion matrix. The shade of a cell is its share of the images of the true class.
 *
 * @param {number} width - In pixels.
 * @param {Object} options
 * @param {number[][]} options.matrix - Number of images, with a row for each true class.
 * @param {string[]} options.classes - Names of the classes.
 * @param {string} options.title
 * @returns {SVGElement}
 */
function matrixChart(width, { matrix, classes, title }) {
  const marginLeft = 24 + LETTER_WIDTH * Math.min(12, Math.max(...classes.map((name) => name.length)));
  const cellSize = Math.max(2, Math.min(46, (width - marginLeft - 8) / classes.length));
  const matrixSize = cellSize * classes.length;
  const chartWidth = Math.min(width, Math.max(MIN_MATRIX_WIDTH, marginLeft + matrixSize + 12));
  const { axis, slantHeight } = createNameAxis(classes, matrixSize);
  const height = matrixSize + 50 + slantHeight;
  const marginBottom = height - matrixSize - 1;
  // The label is centered below the matrix: the longest one that has room at both sides.
  const middle = marginLeft + matrixSize / 2;
  const room = 2 * Math.min(middle, chartWidth - middle);
  const label = MATRIX_LABELS.find((text) => LETTER_WIDTH * text.length < room) ?? MATRIX_LABELS.at(-1);
  const nameStep = Math.max(1, Math.ceil(13 / cellSize));

  const totals = matrix.map((counts) => sum(counts) || 1);
  const correctShare = sum(matrix.map((counts, index) => counts[index])) / sum(totals);
  const cells = matrix.flatMap((counts, trueClass) =>
    counts.map((count, predicted) => ({ trueClass, predicted, count, share: count / totals[trueClass] })),
  );
  const filledCells = cells.filter(({ count }) => count);
  const position = { x: "predicted", y: "trueClass" };

  // Dark cells have white numbers, the others those of the page.
  const createNumbers = (isDark) =>
    Plot.text(
      filledCells.filter(({ share }) => share > 0.77 === isDark),
      {
        ...position,
        text: ({ share }) => formatNumber(100 * share, 0),
        fill: isDark ? "#fff" : "var(--cell-ink)",
      },
    );
  const guide = { ...GUIDE, ...position, fill: "none", stroke: "var(--ink)", inset: 0, maxRadius: cellSize };
  const plotOptions = {
    width: chartWidth,
    height,
    marginLeft,
    marginRight: chartWidth - marginLeft - matrixSize,
    marginTop: 1,
    marginBottom,
    x: {
      type: "band",
      padding: 0,
      ...axis,
      ...labelBelow(label, marginBottom),
    },
    y: {
      type: "band",
      padding: 0,
      domain: indicesOf(classes),
      ticks: indicesOf(classes).filter((index) => index % nameStep === 0),
      tickFormat: (index) => shortenName(classes[index]),
      tickSize: 0,
      label: null,
    },
    opacity: { type: "identity" },
    marks: [
      Plot.frame({ stroke: "var(--line)" }),
      Plot.cell(filledCells, { className: "cell", ...position, fill: "var(--cell)", fillOpacity: "share", inset: 0 }),
      cellSize < 24 ? null : [createNumbers(false), createNumbers(true)],
      Plot.cell(cells, Plot.pointer(guide)),
    ],
  };
  return createChart(
    plotOptions,
    `${title}: ${formatNumber(100 * correctShare, 1)} % are on the diagonal.`,
    ({ trueClass, predicted, count, share }) => {
      const value = `${formatNumber(count)} (${formatNumber(100 * share, 1)} %)`;
      return [`true: ${classes[trueClass]}`, [["", `predicted: ${classes[predicted]}`, value]]];
    },
    (getScale) =>
      filledCells.map(({ trueClass, predicted }) => [
        getScale("x").apply(predicted) + cellSize / 2,
        getScale("y").apply(trueClass) + cellSize / 2,
      ]),
  );
}

/**
 * Draw the most frequent confusions as bars, for data with too many classes for a matrix.
 *
 * @param {number} width - In pixels.
 * @param {Object} options
 * @param {[trueClass: number, predicted: number, count: number, total: number][]} options.confusions - Number of images
 *   of a true class with a predicted one, and of all images of the true class.
 * @param {string[]} options.classes - Names of the classes.
 * @param {string} options.title
 * @returns {SVGElement}
 */
function confusionsChart(width, { confusions, classes, title }) {
  const bars = confusions.map(([trueClass, predicted, count, total], index) => ({
    index,
    trueName: classes[trueClass],
    predictedName: classes[predicted],
    count,
    percent: (100 * count) / total,
  }));
  const shortName = ({ trueName, predictedName }) =>
    `${shortenName(trueName, 16)} as ${shortenName(predictedName, 16)}`;
  const formatBar = ({ count, percent }) => `${formatNumber(count)} (${formatNumber(percent, 1)} %)`;
  const longestName = Math.max(...bars.map((bar) => shortName(bar).length), 1);
  const largest = Math.max(...bars.map(({ percent }) => percent), 1);
  const middle = ({ index }) => index + 0.5;
  const guide = { ...GUIDE_LINE, x: "percent", y: middle, stroke: "var(--back)" };
  const plotOptions = {
    width,
    height: 22 * bars.length + 46,
    marginLeft: Math.min(0.6 * width, 24 + LETTER_WIDTH * longestName),
    marginRight: 90, // for the number at the end of the longest bar
    marginTop: 2,
    marginBottom: WIDE_BOTTOM_MARGIN,
    x: {
      type: "linear",
      domain: [0, largest],
      ticks: width > NARROW_CHART_WIDTH ? 7 : 3,
      ...labelBelow("of the images of the true class, %", WIDE_BOTTOM_MARGIN),
    },
    y: {
      type: "linear",
      domain: [bars.length, 0],
      ticks: bars.map(middle),
      tickFormat: (y) => shortName(bars[y - 0.5]),
      tickSize: 0,
      label: null,
    },
    marks: [
      Plot.rectX(bars, {
        className: "bar",
        x: "percent",
        y1: ({ index }) => index + 0.08,
        y2: ({ index }) => index + 0.92,
        fill: "var(--cell)",
      }),
      Plot.text(bars, { x: "percent", y: middle, dx: 6, textAnchor: "start", text: formatBar }),
      Plot.ruleX([0], { stroke: "var(--line)" }),
      Plot.ruleY(bars, Plot.pointerY(guide)),
    ],
  };
  const texts = bars.slice(0, 5).map((bar) => `${bar.trueName} as ${bar.predictedName} ${formatBar(bar)}`);
  return createChart(
    plotOptions,
    `${title}, the most frequent mistakes: ${texts.join("; ")}`,
    (bar) => [`true: ${bar.trueName}`, [["", `predicted: ${bar.predictedName}`, formatBar(bar)]]],
    (getScale) => bars.map((bar) => [getScale("x").apply(bar.percent / 2), getScale("y").apply(middle(bar))]),
  );
}

// Clients

/**
 * Draw the accuracy at the clients, with a row for each method: a dot for each client, mean and standard deviation over
 * clients, and the mean of the worst tenth.
 *
 * @param {number} width - In pixels.
 * @param {Object} options
 * @param {Object[]} options.sets - {style, accuracies: [client, percent][] (the worst first), mean, deviation,
 *   worst_tenth} of each method.
 * @param {string} options.title
 * @returns {SVGElement}
 */
function clientChart(width, { sets, title }) {
  const rowHeight = 46;
  const values = sets.flatMap((set) => [
    set.worst_tenth,
    set.mean - set.deviation,
    ...set.accuracies.map(([, accuracy]) => accuracy),
  ]);
  const lowest = Math.min(...values, 100);
  const xStart = Math.max(0, Math.floor(lowest / 10) * 10);
  const rows = sets.map((set, index) => ({ ...set, y: index + 0.65 })); // the name is above it
  const bottom = sets.length || 1;

  const createRowMarks = ({ style, mean, deviation, worst_tenth: worstTenth, accuracies, y }) => {
    // Equal accuracies are in two lines, so that one dot does not hide another.
    const dotOptions = {
      className: "client",
      x: ([, accuracy]) => accuracy,
      y: (_, index) => y + (index % 2 ? 0.08 : -0.08),
      r: 3,
      fill: style.color,
      fillOpacity: 0.45,
      stroke: "none",
    };
    const name = { x: xStart, y: y - 0.35, text: (text) => text, textAnchor: "start", fontWeight: 600 };
    const deviationEnds = { x1: Math.max(xStart, mean - deviation), x2: Math.min(100, mean + deviation) };
    return [
      Plot.text([style.title], { ...name, fill: "var(--ink)" }),
      Plot.dot(accuracies, dotOptions),
      Plot.ruleY([y], { ...deviationEnds, stroke: style.color, strokeWidth: 2.4 }),
      Plot.dot([mean], { ariaLabel: () => style.title, x: mean, y, ...filledMarker(style, 5.4) }),
      Plot.dot([worstTenth], { x: worstTenth, y, ...hollowMarker(style, 5.2) }),
    ];
  };

  const plotOptions = {
    width,
    height: rowHeight * sets.length + 48,
    marginLeft: 16,
    marginRight: RIGHT_MARGIN,
    marginTop: 4,
    marginBottom: WIDE_BOTTOM_MARGIN,
    x: {
      type: "linear",
      domain: [xStart, 100],
      ticks: width > NARROW_CHART_WIDTH ? 8 : 4,
      ...labelBelow("accuracy of the final model at a client, %", WIDE_BOTTOM_MARGIN),
    },
    y: { type: "linear", domain: [bottom, 0], axis: null },
    marks: [
      Plot.ruleY([bottom], { stroke: "var(--line)" }),
      Plot.ruleY(rows, { ...GRID_LINE, y: "y" }),
      rows.map(createRowMarks),
      Plot.ruleY(rows, Plot.pointerY({ ...GUIDE_LINE, y: "y" })),
    ],
  };
  const texts = sets.map(({ style, mean, deviation, worst_tenth: worstTenth }) => {
    const spread = `standard deviation ${formatNumber(deviation, 1)}, worst tenth ${formatNumber(worstTenth, 1)} %`;
    return `${style.title} ${formatNumber(mean, 1)} % on average, ${spread}`;
  });
  const describeRow = ({ style, mean, deviation, worst_tenth: worstTenth, accuracies }) => {
    const entries = [
      ["mean", mean],
      ["standard deviation", deviation],
      ["worst tenth", worstTenth],
    ];
    if (accuracies.length) {
      const [client, accuracy] = accuracies[0];
      entries.push([`worst client: ${client}`, accuracy]);
    }
    return [`${style.title}, %`, entries.map(([name, value]) => [style.color, name, formatNumber(value, 1)])];
  };
  return createChart(plotOptions, `${title}: ${texts.join("; ")}`, describeRow, (getScale) =>
    rows.map(({ mean, y }) => [getScale("x").apply(mean), getScale("y").apply(y)]),
  );
}

const IMAGE_COLORS = { labeled: "#0072B2", unlabeled: "#D55E00" };

/**
 * Draw the number of images of each client and class as bubbles: clients from left to right, classes upward, labeled
 * images in the upper panel and unlabeled ones in the lower panel.
 *
 * @param {number} width - In pixels.
 * @param {Object} split - A split as `halfmoon.report.series.split_charts` describes it.
 * @returns {SVGElement}
 */
function bubbleChart(width, split) {
  const { classes, shown_clients: shownClients, server } = split;
  // The server is the first column, followed by an empty one.
  const serverColumns = server ? ["server", ""] : [];
  const columns = [...serverColumns, ...shownClients.map(String)];
  const names = Object.values(classes).flat();
  const longestName = Math.max(...names.map((name) => shortenName(name).length));
  const marginLeft = 24 + LETTER_WIDTH * longestName;
  const columnWidth = Math.min(34, (width - marginLeft - 6) / columns.length);
  const rowHeight = Math.max(5, Math.min(24, 320 / Math.max(classes.labeled.length, classes.unlabeled.length)));
  const panelGap = 30; // has the title of a panel
  const columnsWidth = columnWidth * columns.length;
  const chartWidth = Math.min(width, Math.max(MIN_MATRIX_WIDTH, marginLeft + columnsWidth + 12));

  // Panels may have different rows: images whose class is unknown are in one row. So rows have positions in pixels.
  const panels = [];
  let top = panelGap;
  for (const [kind, color] of Object.entries(IMAGE_COLORS)) {
    const bottom = top + rowHeight * classes[kind].length;
    panels.push(createSplitPanel(split, kind, { color, columns, top, bottom, rowHeight }));
    top = bottom + panelGap;
  }
  const cells = panels.flatMap((panel) => panel.cells);
  const bubbles = cells.filter(({ count }) => count);

  const classStep = Math.max(1, Math.ceil(13 / rowHeight));
  const createPanelMarks = (panel) => [
    Plot.rectY([panel], { y1: "top", y2: "bottom", fill: "none", ...GRID_LINE }),
    Plot.text([panel], {
      y: "top",
      frameAnchor: "left",
      lineAnchor: "bottom",
      textAnchor: "start",
      dy: -5,
      dx: -marginLeft,
      fontWeight: 600,
      fill: "var(--ink)",
      text: "title",
    }),
    Plot.text(
      panel.rows.filter((row, index) => index % classStep === 0),
      { y: "y", frameAnchor: "left", textAnchor: "end", dx: -9, text: "name" },
    ),
    Plot.dot(
      panel.cells.filter(({ count }) => count),
      {
        className: `bubble ${panel.kind}`,
        x: "column",
        y: "y",
        r: "share",
        fill: panel.color,
        fillOpacity: 0.85,
        stroke: "none",
      },
    ),
  ];

  const clientStep = Math.max(1, Math.ceil(24 / columnWidth));
  const hasTick = (column, index) =>
    column === "server" || (column !== "" && (index - serverColumns.length) % clientStep === 0);
  const clientLabel =
    shownClients.length < split.clients
      ? `client (${shownClients.length} of ${split.clients} shown, evenly chosen)`
      : "client";
  const guide = {
    ...GUIDE,
    x: "column",
    y: "y",
    symbol: "square",
    // The radius of a symbol is that of a circle with its area.
    r: Math.max(6, Math.min(columnWidth, rowHeight)) / Math.sqrt(Math.PI),
    fill: "none",
    stroke: "var(--ink)",
    maxRadius: Math.max(columnWidth, rowHeight),
  };
  const plotOptions = {
    width: chartWidth,
    height: top - panelGap + WIDE_BOTTOM_MARGIN,
    marginLeft,
    marginRight: chartWidth - marginLeft - columnsWidth,
    marginTop: panelGap,
    marginBottom: WIDE_BOTTOM_MARGIN,
    x: {
      type: "band",
      padding: 0,
      domain: columns,
      ticks: columns.filter(hasTick),
      tickSize: 0,
      ...labelBelow(clientLabel, WIDE_BOTTOM_MARGIN),
    },
    y: { type: "identity", axis: null },
    // The area of a bubble is proportional to its count.
    r: { type: "sqrt", domain: [0, 1], range: [0, 0.48 * Math.min(columnWidth, Math.max(rowHeight, 8))] },
    marks: [panels.map(createPanelMarks), Plot.dot(cells, Plot.pointer(guide))],
  };
  const describeCell = ({ column, name }) => {
    const countOf = (kind) =>
      cells.find((cell) => cell.kind === kind && cell.column === column && cell.name === name)?.count ?? 0;
    const title = `${column === "server" ? "server" : `client ${column}`}, ${name}`;
    const rows = Object.entries(IMAGE_COLORS).map(([kind, color]) => [color, kind, countOf(kind).toLocaleString("en")]);
    return [title, rows];
  };
  return createChart(
    plotOptions,
    `Images of each client and class: ${split.totals.labeled} labeled, ${split.totals.unlabeled} unlabeled, ` +
      `over ${split.clients} clients.`,
    describeCell,
    (getScale) => bubbles.map(({ column, y }) => [getScale("x").apply(column) + columnWidth / 2, y]),
  );
}

/** Compute the title, the rows and the cells of a panel of `bubbleChart`. The first class is the lowest row. */
function createSplitPanel(split, kind, { color, columns, top, bottom, rowHeight }) {
  const names = split.classes[kind];
  // Only labeled images can be at the server, whose column is followed by an empty one.
  const serverCounts = kind === "labeled" && split.server ? split.server : [];
  const columnCounts = split.server ? [serverCounts, [], ...split[kind]] : split[kind];
  const largestCount = Math.max(1, ...columnCounts.flat());
  const yOf = (index) => bottom - rowHeight * (index + 0.5);
  const cells = columnCounts.flatMap((counts, columnIndex) =>
    counts.map((count, index) => ({
      kind,
      column: columns[columnIndex],
      name: names[index],
      count,
      share: count / largestCount,
      y: yOf(index),
    })),
  );
  const rows = names.map((name, index) => ({ name: shortenName(name), y: yOf(index) }));
  const total = split.totals[kind].toLocaleString("en");
  const title = `${kind}: ${total} images, largest bubble ${largestCount.toLocaleString("en")}`;
  return { kind, color, top, bottom, title, rows, cells };
}

// Calibration

/**
 * Draw the share of correct predictions by their probability. Bars with more images have a stronger color.
 *
 * @param {number} width - In pixels.
 * @param {Object} options
 * @param {Object[]} options.bins - Predictions with probabilities from `above` to `to`: number of `images`, mean
 *   `confidence` and `accuracy`, from 0 to 1.
 * @param {string} options.title
 * @returns {SVGElement}
 */
function calibrationChart(width, { bins, title }) {
  const formatShare = (share) => `${(100 * share).toFixed(0)} %`;
  const filledBins = bins.filter((bin) => bin.images);
  const largestCount = Math.max(1, ...bins.map((bin) => bin.images));
  const middle = (bin) => (bin.above + bin.to) / 2;
  const axis = { type: "linear", domain: [0, 1], ticks: 5, tickFormat: formatShare, tickSize: 0 };
  const diagonal = [
    [0, 0],
    [1, 1],
  ];
  const barOptions = {
    className: "bar",
    x1: "above",
    x2: "to",
    y: "accuracy",
    insetLeft: 1,
    insetRight: 1,
    fill: "var(--cell)",
    fillOpacity: (bin) => 0.35 + (0.65 * bin.images) / largestCount,
  };
  const plotOptions = {
    width,
    height: width,
    marginLeft: 48,
    marginRight: 20,
    marginTop: 10,
    marginBottom: WIDE_BOTTOM_MARGIN,
    x: { ...axis, ...labelBelow("probability; stronger color: more images", WIDE_BOTTOM_MARGIN) },
    y: { ...axis, label: null },
    opacity: { type: "identity" },
    marks: [
      Plot.gridY({ ...GRID_LINE, ticks: 5 }),
      Plot.rectY(filledBins, barOptions),
      Plot.line(diagonal, { stroke: "var(--soft)", strokeDasharray: "4 4" }),
      Plot.ruleX(filledBins, Plot.pointerX({ ...GUIDE_LINE, x: middle })),
    ],
  };
  const texts = filledBins.map(
    (bin) => `${formatShare(bin.confidence)} confident, ${formatShare(bin.accuracy)} right, ${bin.images} images`,
  );
  const describeBin = (bin) => [
    `${formatNumber(bin.images)} images`,
    [
      ["var(--cell)", "confident on average", `${formatNumber(100 * bin.confidence, 1)} %`],
      ["var(--cell)", "right", `${formatNumber(100 * bin.accuracy, 1)} %`],
    ],
  ];
  return createChart(plotOptions, `${title}: ${texts.join("; ")}`, describeBin, (getScale) =>
    filledBins.map((bin) => [getScale("x").apply(middle(bin)), width / 2]),
  );
}
