/* global Plot, computeAxisRange, createChart, filledMarker, formatNumber, hollowMarker, shortenName */
// The kinds of charts, described as marks of Observable Plot. Each takes the width it has and returns an SVG.

const HEIGHT = 290;
const RULE = { stroke: "var(--grid)", strokeOpacity: 1 };
// The label of an axis, at the lower edge of a margin.
const below = (label, marginBottom) => ({ label, labelAnchor: "center", labelArrow: "none", labelOffset: marginBottom - 5 });
const NUMBERS = { label: null, tickSize: 0, grid: false, ticks: 5 };

// Room for the numbers of an axis at its left side.
function leftMargin([low, high]) {
  const digits = Math.max(0, Math.ceil(-Math.log10((high - low) / 5)));
  const whole = high >= 10000 ? 4 : Math.max(formatNumber(low, 0).length, formatNumber(high, 0).length);
  return 16 + 6.7 * (whole + (digits ? digits + 1 : 0));
}

const ticked = ([low, high]) => (Math.max(Math.abs(low), Math.abs(high)) >= 10000 ? (value) => formatNumber(value) : undefined);

// Lines over a number: lines of {style, x, mean, low, high}, or {style, points, published} along an axis of the study.
function lineChart(width, spec) {
  const { lines, title, xLabel, percent, height = HEIGHT } = spec;
  const dots = lines.flatMap((line) => line.published ?? []);
  const places = [...new Set([...lines.flatMap((line) => line.x), ...dots.map((dot) => dot.x)])].sort((a, b) => a - b);
  const spread = dots.flatMap((dot) => [dot.mean - (dot.deviation ?? 0), dot.mean + (dot.deviation ?? 0)]);
  const ys = [...lines.flatMap((line) => [...line.low, ...line.high]), ...spread].filter(Number.isFinite);
  const yRange = ys.length ? computeAxisRange(ys, percent ? 4 : 0.02, spec.least ?? 0, percent ? 100 : spec.most ?? 1) : [0, 1];
  let xRange = places.length ? [places[0], places.at(-1)] : [0, 1];
  if (xRange[0] === xRange[1]) xRange = [xRange[0] - 1, xRange[1] + 1];
  const margin = spec.exact ? 0.03 * (xRange[1] - xRange[0]) : 0;
  xRange = [xRange[0] - margin, xRange[1] + margin];
  const most = width > 420 ? 7 : 4;
  const few = spec.exact && places.length <= most + 3 && places.length > 1;
  const xTicks = few ? places : spec.whole ? Math.max(1, Math.min(most, Math.floor(xRange[1] - xRange[0]))) : most;
  const ends = lines.filter((line) => line.mean.length).map((line) => `${line.style.title} ends at ${formatNumber(line.mean.at(-1))}`);
  const reach = (places.at(-1) - places[0]) / 40;
  return createChart({
    width, height, marginLeft: leftMargin(yRange), marginRight: 14, marginTop: 8, marginBottom: 40,
    x: { type: "linear", domain: xRange, ...below(xLabel, 40), ticks: xTicks, tickFormat: few ? (value) => (Math.abs(value) < 10000 ? String(value) : formatNumber(value)) : ticked(xRange) },
    y: { type: "linear", domain: yRange, ...NUMBERS, ticks: spec.height ? 3 : 5, tickFormat: ticked(yRange) },
    marks: [
      Plot.gridY({ ...RULE, ticks: spec.height ? 3 : 5 }),
      Plot.ruleY([yRange[0]], { stroke: "var(--line)" }),
      lines.map((line, n) => lineMarks(line, n, lines.length)),
      Plot.ruleX(places.map((x) => ({ x })), Plot.pointerX({ className: "guide", ariaHidden: "true", x: "x", stroke: "var(--line)", strokeDasharray: "2 3", maxRadius: Infinity })),
    ],
  }, `${title}, against ${xLabel}: ${ends.join("; ") || "no line is shown"}.`, ({ x }) => [
    `${xLabel} ${formatNumber(x)}`, lines.flatMap((line) => valuesAt(line, x, reach)).sort((a, b) => b[3] - a[3]),
  ], (scale) => places.map((x) => [scale("x").apply(x), height / 3]));
}

function lineMarks(line, number, count) {
  const { style } = line;
  const points = line.x.map((x, n) => ({ x, mean: line.mean[n], low: line.low[n], high: line.high[n] }));
  // Markers of neighbors are at different places, so that none hides another.
  const every = line.dense ? 1 : Math.max(1, Math.floor(points.length / 7));
  const first = line.dense ? 0 : Math.floor((number * every) / Math.max(1, count)) % every;
  const published = line.published ?? [];
  return [
    line.seeds > 1 ? Plot.areaY(points, { className: "band", x: "x", y1: "low", y2: "high", fill: style.color, fillOpacity: 0.13 }) : null,
    line.bars ? Plot.ruleX(points, { x: "x", y1: "low", y2: "high", stroke: style.color, strokeOpacity: 0.5 }) : null,
    Plot.line(points, { className: "line", ariaLabel: () => style.title, x: "x", y: "mean", stroke: style.color, strokeWidth: 2, strokeLinecap: "butt", strokeDasharray: style.dashes || undefined }),
    Plot.dot(points.filter((_, n) => n % every === first), { className: "marker", x: "x", y: "mean", ...filledMarker(style, 3.8) }),
    Plot.ruleX(published, { x: "x", y1: (dot) => dot.mean - dot.deviation, y2: (dot) => dot.mean + dot.deviation, stroke: style.color, strokeWidth: 1.4 }),
    Plot.dot(published, { className: "published", x: "x", y: "mean", ...hollowMarker(style, 4.6) }),
  ];
}

// The rows of a tooltip: each line's value nearest to a place, if it has one within reach.
function valuesAt(line, at, reach) {
  const rows = [];
  if (line.x.length) {
    const n = line.x.reduce((best, each, m) => (Math.abs(each - at) < Math.abs(line.x[best] - at) ? m : best), 0);
    const seeds = line.seeds > 1 ? ` (${formatNumber(line.low[n], 2)} to ${formatNumber(line.high[n], 2)})` : "";
    if (Math.abs(line.x[n] - at) <= reach) rows.push([line.style.color, line.style.title, formatNumber(line.mean[n], 2) + seeds, line.mean[n]]);
  }
  for (const dot of line.published ?? []) {
    const spread = dot.deviation ? ` \u00b1 ${formatNumber(dot.deviation, 2)}` : "";
    if (dot.x === at) rows.push([line.style.color, `${line.style.title}, published`, formatNumber(dot.mean, 2) + spread, dot.mean]);
  }
  return rows;
}

// An axis of names: slanted where they have no room beside each other, and then as many as there is room for.
function nameAxis(names, room) {
  const longest = Math.max(...names.map((name) => shortenName(name).length), 1);
  const fits = names.length * (6.8 * longest + 6) <= room;
  const every = fits ? 1 : Math.max(1, Math.ceil((names.length * 15) / room));
  const shownNames = names.map((_, n) => n).filter((n) => n % every === 0);
  const steep = fits ? 0 : 4.4 * longest;
  return { steep, axis: { domain: names.map((_, n) => n), ticks: shownNames, tickFormat: (n) => shortenName(names[n]), tickSize: 0, ...(fits ? {} : { tickRotate: -38 }) } };
}

// Dots over classes: sets of {style, mean, low, high}, side by side within a class.
function classChart(width, spec) {
  const { sets, classes, title, yLabel } = spec;
  const top = Math.max(...sets.flatMap((set) => set.high ?? set.mean), 1);
  const yRange = [0, spec.full ? 100 : Math.min(100, top * 1.06)];
  const alt = `${title}, by class: ` + sets.map((set) => `${set.style.title} ${formatNumber(Math.min(...set.mean), 1)} to ${formatNumber(Math.max(...set.mean), 1)} %`).join("; ");
  const marginLeft = leftMargin(yRange);
  const { axis, steep } = nameAxis(classes, width - marginLeft - 14);
  const step = (width - marginLeft - 14) / classes.length;
  const room = Math.min(0.8, 0.13 * sets.length) * step;
  const size = classes.length > 40 ? 2.4 : 3.8;
  const setMarks = (set, s) => {
    const points = set.mean.map((mean, n) => ({ n, mean, low: set.low?.[n] ?? 0, high: set.high?.[n] ?? mean }));
    const dx = sets.length > 1 ? (s / (sets.length - 1) - 0.5) * room : 0;
    return [
      Plot.ruleX(points, { x: "n", y1: "low", y2: "high", dx, stroke: set.style.color, strokeWidth: 1.4, strokeOpacity: 0.55 }),
      Plot.dot(points, { className: "marker", ariaLabel: () => set.style.title, x: "n", y: "mean", dx, ...filledMarker(set.style, size) }),
    ];
  };
  const places = classes.map((_, n) => ({ n }));
  return createChart({
    width, height: HEIGHT, marginLeft, marginRight: 14, marginTop: 8, marginBottom: 40 + steep,
    x: { type: "band", padding: 0, ...axis, ...below(yLabel, 40 + steep) },
    y: { type: "linear", domain: yRange, ...NUMBERS },
    marks: [
      Plot.gridY({ ...RULE, ticks: 5 }),
      Plot.ruleY([0], { stroke: "var(--line)" }),
      Plot.cell(places, Plot.pointerX({ className: "guide", ariaHidden: "true", x: "n", fill: "currentColor", fillOpacity: 0.08, maxRadius: Infinity })),
      sets.map(setMarks),
    ],
  }, alt, ({ n }) => [classes[n], sets.map((set) => [set.style.color, set.style.title, `${formatNumber(set.mean[n], 2)} %`])],
  (scale) => places.map(({ n }) => [scale("x").apply(n) + step / 2, HEIGHT / 3]));
}

// A confusion matrix: rows are the true classes, a cell's shade is its share of the row.
function matrixChart(width, { matrix, classes, title }) {
  const size = classes.length;
  const marginLeft = 24 + 6.7 * Math.min(12, Math.max(...classes.map((name) => name.length)));
  const side = Math.max(2, Math.min(46, (width - marginLeft - 8) / size));
  const span = side * size;
  const across = Math.min(width, Math.max(330, marginLeft + span + 12));
  const names = nameAxis(classes, span);
  const every = Math.max(1, Math.ceil(13 / side));
  const right = matrix.map((row) => row.reduce((sum, count) => sum + count, 0) || 1);
  const correct = matrix.reduce((sum, row, t) => sum + row[t], 0) / right.reduce((sum, count) => sum + count, 0);
  const cells = matrix.flatMap((row, t) => row.map((count, p) => ({ t, p, count, share: count / right[t] })));
  const some = cells.filter(({ count }) => count);
  const height = span + 50 + names.steep;
  return createChart({
    width: across, height, marginLeft, marginRight: across - marginLeft - span, marginTop: 1, marginBottom: height - span - 1,
    x: { type: "band", padding: 0, ...names.axis, ...below("predicted class (rows: true class), % of the row", height - span - 1) },
    y: { type: "band", padding: 0, domain: classes.map((_, n) => n), ticks: classes.map((_, n) => n).filter((n) => n % every === 0), tickFormat: (n) => shortenName(classes[n]), tickSize: 0, label: null },
    opacity: { type: "identity" },
    marks: [
      Plot.frame({ stroke: "var(--line)" }),
      Plot.cell(some, { className: "cell", x: "p", y: "t", fill: "var(--cell)", fillOpacity: "share", inset: 0 }),
      side < 24 ? null : [false, true].map((dark) => Plot.text(some.filter(({ share }) => share > 0.77 === dark), { x: "p", y: "t", text: ({ share }) => formatNumber(100 * share, 0), fill: dark ? "#fff" : "var(--cell-ink)" })),
      Plot.cell(cells, Plot.pointer({ className: "guide", ariaHidden: "true", x: "p", y: "t", fill: "none", stroke: "var(--ink)", inset: 0, maxRadius: side })),
    ],
  }, `${title}: ${formatNumber(100 * correct, 1)} % lie on the diagonal.`,
  ({ t, p, count, share }) => [`true: ${classes[t]}`, [["", `predicted: ${classes[p]}`, `${formatNumber(count)} (${formatNumber(100 * share, 1)} %)`]]],
  (scale) => some.map(({ t, p }) => [scale("x").apply(p) + side / 2, scale("y").apply(t) + side / 2]));
}

// With very many classes: what is mistaken for what most often, as entries [true class, predicted class, images, images of the true class].
function confusionsChart(width, { entries, classes, title }) {
  const rows = entries.map(([t, p, count, all], n) => ({ n, t, p, count, share: (100 * count) / all, name: `${shortenName(classes[t], 16)} as ${shortenName(classes[p], 16)}` }));
  const marginLeft = Math.min(0.6 * width, 24 + 6.7 * Math.max(...rows.map(({ name }) => name.length), 1));
  const height = 22 * rows.length + 46;
  const numbers = ({ count, share }) => `${formatNumber(count)} (${formatNumber(share, 1)} %)`;
  return createChart({
    width, height, marginLeft, marginRight: 90, marginTop: 2, marginBottom: 44,
    x: { type: "linear", domain: [0, Math.max(...rows.map(({ share }) => share), 1)], ticks: width > 420 ? 7 : 3, ...below("of the images of the true class, %", 44) },
    y: { type: "linear", domain: [rows.length, 0], ticks: rows.map(({ n }) => n + 0.5), tickFormat: (y) => rows[y - 0.5].name, tickSize: 0, label: null },
    marks: [
      Plot.rectX(rows, { className: "bar", x: "share", y1: ({ n }) => n + 0.08, y2: ({ n }) => n + 0.92, fill: "var(--cell)" }),
      Plot.text(rows, { x: "share", y: ({ n }) => n + 0.5, dx: 6, textAnchor: "start", text: numbers }),
      Plot.ruleX([0], { stroke: "var(--line)" }),
      Plot.ruleY(rows, Plot.pointerY({ className: "guide", ariaHidden: "true", x: "share", y: ({ n }) => n + 0.5, stroke: "var(--back)", strokeDasharray: "2 3", maxRadius: Infinity })),
    ],
  }, `${title}, the most frequent mistakes: ${rows.slice(0, 5).map((row) => `${classes[row.t]} as ${classes[row.p]} ${numbers(row)}`).join("; ")}`,
  (row) => [`true: ${classes[row.t]}`, [["", `predicted: ${classes[row.p]}`, numbers(row)]]],
  (scale) => rows.map(({ n, share }) => [scale("x").apply(share / 2), scale("y").apply(n + 0.5)]));
}

// A row for each method: a dot for each client, mean and standard deviation over clients, and the mean of the worst tenth.
function clientChart(width, { sets, title }) {
  const row = 46;
  const alt = `${title}: ` + sets.map(({ style, mean, deviation, worst }) => `${style.title} ${formatNumber(mean, 1)} % on average, standard deviation ${formatNumber(deviation, 1)}, worst tenth ${formatNumber(worst, 1)} %`).join("; ");
  const lowest = Math.min(...sets.flatMap((set) => [set.worst, set.mean - set.deviation, ...set.each.map(([, share]) => share)]), 100);
  const xRange = [Math.max(0, Math.floor(lowest / 10) * 10), 100];
  const height = row * sets.length + 48;
  const rows = sets.map((set, n) => ({ ...set, y: n + 0.65 }));
  return createChart({
    width, height, marginLeft: 16, marginRight: 14, marginTop: 4, marginBottom: 44,
    x: { type: "linear", domain: xRange, ticks: width > 420 ? 8 : 4, ...below("accuracy of the final model at a client, %", 44) },
    y: { type: "linear", domain: [sets.length || 1, 0], axis: null },
    marks: [
      Plot.ruleY([sets.length || 1], { stroke: "var(--line)" }),
      Plot.ruleY(rows, { ...RULE, y: "y" }),
      rows.map(({ style, mean, deviation, worst, each, y }) => [
        Plot.text([style.title], { x: xRange[0], y: y - 0.35, text: (name) => name, textAnchor: "start", fontWeight: 600, fill: "var(--ink)" }),
        // Equal accuracies are in two rows, so that one dot does not hide another.
        Plot.dot(each, { className: "client", x: (client) => client[1], y: (_, k) => y + (k % 2 ? 0.08 : -0.08), r: 3, fill: style.color, fillOpacity: 0.45, stroke: "none" }),
        Plot.ruleY([y], { x1: Math.max(xRange[0], mean - deviation), x2: Math.min(100, mean + deviation), stroke: style.color, strokeWidth: 2.4 }),
        Plot.dot([mean], { ariaLabel: () => style.title, x: mean, y, ...filledMarker(style, 5.4) }),
        Plot.dot([worst], { x: worst, y, ...hollowMarker(style, 5.2) }),
      ]),
      Plot.ruleY(rows, Plot.pointerY({ className: "guide", ariaHidden: "true", y: "y", stroke: "var(--line)", strokeDasharray: "2 3", maxRadius: Infinity })),
    ],
  }, alt, ({ style, mean, deviation, worst, each }) => {
    const values = [["mean", mean], ["standard deviation", deviation], ["worst tenth", worst]];
    if (each.length) values.push([`worst client: ${each[0][0]}`, each[0][1]]);
    return [`${style.title}, %`, values.map(([name, value]) => [style.color, name, formatNumber(value, 1)])];
  }, (scale) => rows.map(({ mean, y }) => [scale("x").apply(mean), scale("y").apply(y)]));
}

// Clients from left to right, classes upwards, one panel for labeled and one for unlabeled images.
const KINDS = { labeled: "#0072B2", unlabeled: "#D55E00" };
function bubbleChart(width, split) {
  const { classes, shown: clients, server } = split;
  const columns = [...(server ? ["server", ""] : []), ...clients.map(String)];
  const marginLeft = 24 + 6.7 * Math.max(...classes.map((name) => shortenName(name).length));
  const across = Math.min(34, (width - marginLeft - 6) / columns.length);
  const up = Math.max(5, Math.min(24, 320 / classes.length));
  const tall = up * classes.length;
  const gap = 30;
  const most = {};
  const cells = Object.keys(KINDS).flatMap((kind) => {
    const counts = [...(server ? [kind === "labeled" ? server : null, null] : []), ...split[kind]];
    most[kind] = Math.max(1, ...counts.flatMap((row) => row ?? []));
    return counts.flatMap((row, k) => (row ?? []).map((count, c) => ({ kind, column: columns[k], c, count, share: count / most[kind] })));
  });
  const hasClasses = (kind) => cells.some((cell) => cell.kind === kind && cell.count);
  // Images whose true label nobody knows are in the total, and in no bubble.
  const ofClasses = (kind) => (hasClasses(kind) || !split.totals[kind] ? `largest bubble ${most[kind].toLocaleString("en")}` : "whose classes are unknown");
  const countAt = (kind, { column, c }) => cells.find((cell) => cell.kind === kind && cell.column === column && cell.c === c)?.count ?? 0;
  const wide = Math.min(width, Math.max(330, marginLeft + across * columns.length + 12));
  const everyClass = Math.max(1, Math.ceil(13 / up));
  const everyClient = Math.max(1, Math.ceil(24 / across));
  const some = clients.length < split.clients ? `client (${clients.length} of ${split.clients} shown, evenly chosen)` : "client";
  const shownColumns = columns.filter((name, k) => name === "server" || (name && (k - (server ? 2 : 0)) % everyClient === 0));
  return createChart({
    width: wide, height: 2 * (tall + gap) + 44, marginLeft, marginRight: wide - marginLeft - across * columns.length, marginTop: gap, marginBottom: 44,
    x: { type: "band", padding: 0, domain: columns, ticks: shownColumns, tickSize: 0, ...below(some, 44) },
    y: { type: "band", padding: 0, domain: classes.map((_, c) => c).reverse(), ticks: classes.map((_, c) => c).filter((c) => c % everyClass === 0), tickFormat: (c) => shortenName(classes[c]), tickSize: 0, label: null },
    fy: { domain: Object.keys(KINDS), axis: null, paddingInner: gap / (tall + gap), paddingOuter: 0 },
    r: { type: "sqrt", domain: [0, 1], range: [0, 0.48 * Math.min(across, Math.max(up, 8))] },
    marks: [
      Plot.frame({ ...RULE }),
      Object.entries(KINDS).map(([kind, fill]) => [
        Plot.text([kind], { fy: [kind], frameAnchor: "top-left", lineAnchor: "bottom", textAnchor: "start", dy: -5, dx: -marginLeft, fontWeight: 600, fill: "var(--ink)", text: () => `${kind}: ${split.totals[kind].toLocaleString("en")} images, ${ofClasses(kind)}` }),
        Plot.dot(cells.filter((cell) => cell.kind === kind && cell.count), { className: `bubble ${kind}`, fy: "kind", x: "column", y: "c", r: "share", fill, fillOpacity: 0.85, stroke: "none" }),
      ]),
      Plot.cell(cells, Plot.pointer({ className: "guide", ariaHidden: "true", fy: "kind", x: "column", y: "c", fill: "none", stroke: "var(--ink)", inset: 0, maxRadius: Math.max(across, up) })),
    ],
  }, `Images of each client and class: ${split.totals.labeled} labeled, ${split.totals.unlabeled} unlabeled, over ${split.clients} clients.`,
  (cell) => [`${cell.column === "server" ? "server" : `client ${cell.column}`}, ${classes[cell.c]}`, Object.entries(KINDS).map(([kind, color]) => [color, kind, countAt(kind, cell).toLocaleString("en")])],
  (scale) => cells.filter(({ count }) => count).map(({ kind, column, c }) => [scale("x").apply(column) + across / 2, scale("fy").apply(kind) + scale("y").apply(c) - gap + up / 2]));
}

// Shares of correct predictions by their probability: bins {above, to, confidence, accuracy, images}; stronger color: more images.
function calibrationChart(width, { bins, title }) {
  const share = (value) => `${(100 * value).toFixed(0)} %`;
  const most = Math.max(1, ...bins.map((bin) => bin.images));
  const some = bins.filter((bin) => bin.images);
  const middle = (bin) => (bin.above + bin.to) / 2;
  const axis = { type: "linear", domain: [0, 1], ticks: 5, tickFormat: share, tickSize: 0 };
  return createChart({
    width, height: width, marginLeft: 48, marginRight: 20, marginTop: 10, marginBottom: 44,
    x: { ...axis, ...below("probability; stronger color: more images", 44) },
    y: { ...axis, label: null },
    opacity: { type: "identity" },
    marks: [
      Plot.gridY({ ...RULE, ticks: 5 }),
      Plot.rectY(some, { className: "bar", x1: "above", x2: "to", y: "accuracy", insetLeft: 1, insetRight: 1, fill: "var(--cell)", fillOpacity: (bin) => 0.35 + (0.65 * bin.images) / most }),
      Plot.line([[0, 0], [1, 1]], { stroke: "var(--soft)", strokeDasharray: "4 4" }),
      Plot.ruleX(some, Plot.pointerX({ className: "guide", ariaHidden: "true", x: middle, stroke: "var(--line)", strokeDasharray: "2 3", maxRadius: Infinity })),
    ],
  }, `${title}: ${some.map((bin) => `${share(bin.confidence)} confident, ${share(bin.accuracy)} right, ${bin.images} images`).join("; ")}`,
  (bin) => [`${formatNumber(bin.images)} images`, [["var(--cell)", "confident on average", `${formatNumber(100 * bin.confidence, 1)} %`], ["var(--cell)", "right", `${formatNumber(100 * bin.accuracy, 1)} %`]]],
  (scale) => some.map((bin) => [scale("x").apply(middle(bin)), width / 2]));
}
