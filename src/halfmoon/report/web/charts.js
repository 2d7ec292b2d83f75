// The kinds of charts. Each takes the width it has and returns an SVG.

const HEIGHT = 290;

// Lines over a number: lines of {look, x, mean, low, high}, or {look, points, published} along an axis of the study.
function lineChart(width, spec) {
  const { lines, title, xLabel, percent } = spec;
  const dots = lines.flatMap((line) => line.published ?? []);
  const xs = [...lines.flatMap((line) => line.x), ...dots.map((dot) => dot.x)];
  const spread = dots.flatMap((dot) => [dot.mean - (dot.deviation ?? 0), dot.mean + (dot.deviation ?? 0)]);
  const ys = [...lines.flatMap((line) => [...line.low, ...line.high]), ...spread];
  const yRange = ys.length ? range(ys, percent ? 4 : 0.02, spec.least ?? 0, percent ? 100 : spec.most ?? 1) : [0, 1];
  const xRange = xs.length ? [Math.min(...xs), Math.max(...xs)] : [0, 1];
  if (xRange[0] === xRange[1]) xRange.splice(0, 2, xRange[0] - 1, xRange[1] + 1);
  const margin = spec.exact ? 0.03 * (xRange[1] - xRange[0]) : 0;
  xRange[0] -= margin;
  xRange[1] += margin;
  const step = width > 420 ? 7 : 4;
  const yTicks = ticks(...yRange, spec.height ? 3 : 5);
  const places = [...new Set(xs)];
  const few = spec.exact && places.length <= step + 3 && places.length > 1;
  const xTicks = few ? places.sort((a, b) => a - b) : ticks(...xRange, step).filter((tick) => !spec.whole || Number.isInteger(tick));
  const ends = lines.filter((line) => line.mean.length).map((line) => `${line.look.title} ends at ${shown(line.mean.at(-1))}`);
  const alt = `${title}, against ${xLabel}: ${ends.join("; ") || "no line is shown"}.`;
  const made = picture(width, spec.height ?? HEIGHT, alt, {
    x: { range: xRange, ticks: written(xTicks) },
    y: { range: yRange, ticks: written(yTicks) },
    label: xLabel,
  });
  lines.forEach((line, n) => made.root.append(drawLine(made, line, n, lines.length)));
  made.root.setAttribute("tabindex", "0");
  hoverLines(made, lines, xs, xLabel);
  return made.root;
}

function drawLine({ x, y }, line, number, count) {
  const at = (values) => values.map((value, n) => `${x(line.x[n]).toFixed(1)} ${y(value).toFixed(1)}`);
  const group = svg("g", { "data-line": line.look.title });
  if (line.seeds > 1 && line.x.length) {
    const area = `M${at(line.high).join("L")}L${at(line.low).reverse().join("L")}Z`;
    group.append(svg("path", { class: "band", d: area, fill: line.look.color, opacity: 0.13 }));
  }
  const bar = (n) => ({ x1: x(line.x[n]), x2: x(line.x[n]), y1: y(line.low[n]), y2: y(line.high[n]) });
  if (line.bars) group.append(...line.x.map((_, n) => svg("line", { ...bar(n), stroke: line.look.color, opacity: 0.5 })));
  const path = { class: "line", d: line.x.length ? `M${at(line.mean).join("L")}` : "", stroke: line.look.color };
  group.append(svg("path", { ...path, "stroke-dasharray": line.look.dashes }));
  // Markers of neighbors stand at different places, so that none hides another.
  const every = line.dense ? 1 : Math.max(1, Math.floor(line.x.length / 7));
  const first = line.dense ? 0 : Math.floor((number * every) / Math.max(1, count));
  line.mean.forEach((value, n) => {
    if (n % every === first % every) group.append(marker(line.look, x(line.x[n]), y(value), 3.4));
  });
  for (const dot of line.published ?? []) {
    const across = x(dot.x);
    if (dot.deviation) {
      const ends = { y1: y(dot.mean - dot.deviation).toFixed(1), y2: y(dot.mean + dot.deviation).toFixed(1) };
      group.append(svg("line", { x1: across, x2: across, stroke: line.look.color, "stroke-width": 1.4, ...ends }));
    }
    const hollow = marker(line.look, across, y(dot.mean), 4.4, true);
    hollow.classList.add("published");
    group.append(hollow);
  }
  return group;
}

function hoverLines({ root, x, box }, lines, xs, xLabel) {
  const places = [...new Set(xs)].sort((a, b) => a - b);
  const guide = svg("line", { class: "guide", y1: box.top, y2: box.bottom, visibility: "hidden" });
  root.append(guide);
  let place = -1;
  const show = (clientX, clientY) => {
    const at = places[place];
    guide.setAttribute("x1", x(at));
    guide.setAttribute("x2", x(at));
    guide.setAttribute("visibility", "visible");
    const reach = (places.at(-1) - places[0]) / 40;
    const rows = lines.flatMap((line) => valuesAt(line, at, reach));
    tip.show(clientX, clientY, `${xLabel} ${shown(at)}`, rows.sort((a, b) => b[3] - a[3]));
  };
  const leave = () => {
    guide.setAttribute("visibility", "hidden");
    tip.hide();
  };
  const nearest = (value) => places.reduce((best, each, n) => (Math.abs(x(each) - value) < Math.abs(x(places[best]) - value) ? n : best), 0);
  if (!places.length) return;
  follow(root, (across, _, clientX, clientY) => {
    place = nearest(across);
    show(clientX, clientY);
  }, leave);
  root.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    place = Math.min(places.length - 1, Math.max(0, place + by));
    const frame = root.getBoundingClientRect();
    show(frame.left + (x(places[place]) / root.viewBox.baseVal.width) * frame.width, frame.top + frame.height / 3);
  });
}

// The rows of a tooltip: each line's value nearest to a place, if it has one within reach.
function valuesAt(line, at, reach) {
  const rows = [];
  if (line.x.length) {
    const n = line.x.reduce((best, each, m) => (Math.abs(each - at) < Math.abs(line.x[best] - at) ? m : best), 0);
    const seeds = line.seeds > 1 ? ` (${shown(line.low[n], 2)} to ${shown(line.high[n], 2)})` : "";
    if (Math.abs(line.x[n] - at) <= reach) rows.push([line.look.color, line.look.title, shown(line.mean[n], 2) + seeds, line.mean[n]]);
  }
  for (const dot of line.published ?? []) {
    const spread = dot.deviation ? ` \u00b1 ${shown(dot.deviation, 2)}` : "";
    if (dot.x === at) rows.push([line.look.color, `${line.look.title}, published`, shown(dot.mean, 2) + spread, dot.mean]);
  }
  return rows;
}

// Dots over classes: sets of {look, mean, low, high}, side by side within a class.
function classChart(width, spec) {
  const { sets, classes, title, yLabel } = spec;
  const top = Math.max(...sets.flatMap((set) => set.high ?? set.mean), 1);
  const yRange = [0, spec.full ? 100 : Math.min(100, top * 1.06)];
  const alt = `${title}, by class: ` + sets.map((set) => `${set.look.title} ${shown(Math.min(...set.mean), 1)} to ${shown(Math.max(...set.mean), 1)} %`).join("; ");
  const made = picture(width, HEIGHT, alt, {
    x: { range: [-0.5, classes.length - 0.5], marks: false, ...named(classes, width - 50) },
    y: { range: yRange, ticks: written(ticks(...yRange, 5)) },
    label: yLabel,
  });
  const { root, x, y, box } = made;
  const room = Math.min(0.8, 0.13 * sets.length);
  const size = classes.length > 40 ? 2.2 : 3.6;
  sets.forEach((set, s) => {
    const group = svg("g", { "data-line": set.look.title });
    set.mean.forEach((value, n) => {
      const across = x(n + (sets.length > 1 ? (s / (sets.length - 1) - 0.5) * room : 0));
      const ends = { y1: y(set.low ? set.low[n] : 0).toFixed(1), y2: y(set.high ? set.high[n] : value).toFixed(1) };
      group.append(svg("line", { x1: across, x2: across, stroke: set.look.color, "stroke-width": 1.4, opacity: 0.55, ...ends }));
      group.append(marker(set.look, across, y(value), size));
    });
    root.append(group);
  });
  const slot = svg("rect", { y: box.top, width: x(1) - x(0), height: box.bottom - box.top, fill: "currentColor", opacity: 0.06, visibility: "hidden" });
  root.append(slot);
  follow(root, (across, _, clientX, clientY) => {
    const n = Math.floor((across - box.left) / (x(1) - x(0)));
    if (n < 0 || n >= classes.length) return;
    slot.setAttribute("x", x(n - 0.5));
    slot.setAttribute("visibility", "visible");
    tip.show(clientX, clientY, classes[n], sets.map((set) => [set.look.color, set.look.title, `${shown(set.mean[n], 2)} %`]));
  }, () => {
    slot.setAttribute("visibility", "hidden");
    tip.hide();
  });
  return root;
}

// A confusion matrix: rows are the true classes, a cell's shade is its share of the row.
function matrixChart(width, { matrix, classes, title }) {
  const size = classes.length;
  const longest = Math.min(12, Math.max(...classes.map((name) => name.length)));
  const left = 22 + 6.7 * longest;
  const side = Math.max(2, Math.min(46, (width - left - 8) / size));
  const span = side * size;
  const below = named(classes, side * size);
  const right = matrix.map((row) => row.reduce((sum, count) => sum + count, 0) || 1);
  const kept = matrix.reduce((sum, row, t) => sum + row[t], 0) / right.reduce((sum, count) => sum + count, 0);
  const height = span + 46 + below.steep;
  const root = canvas(Math.min(width, Math.max(330, left + span + 12)), height, `${title}: ${shown(100 * kept, 1)} % lie on the diagonal.`);
  const every = Math.max(1, Math.ceil(13 / side));
  classes.forEach((name, n) => {
    const middle = (n + 0.5) * side;
    if (n % every === 0) root.append(svg("text", { x: left - 5, y: middle, "text-anchor": "end", "dominant-baseline": "central" }, clipped(name)));
  });
  for (const [n, text] of below.ticks) {
    const middle = left + (n + 0.5) * side;
    root.append(below.steep ? slanted(text, middle, span + 8) : level(text, middle, span + 15, width));
  }
  matrix.forEach((row, t) => row.forEach((count, p) => {
    if (!count) return;
    const share = count / right[t];
    const fill = `color-mix(in srgb, var(--cell) ${(100 * share).toFixed(1)}%, var(--back))`;
    root.append(svg("rect", { class: "cell", x: (left + p * side).toFixed(1), y: (t * side).toFixed(1), width: side.toFixed(2), height: side.toFixed(2), fill, "data-share": share.toFixed(4) }));
    if (side >= 24) {
      const words = { x: left + (p + 0.5) * side, y: (t + 0.5) * side, "text-anchor": "middle", "dominant-baseline": "central", style: `fill:${share > 0.77 ? "#fff" : "var(--cell-ink)"}` };
      root.append(svg("text", words, shown(100 * share, 0)));
    }
  }));
  root.append(svg("rect", { class: "axis", x: left, y: 0.5, width: span, height: span, fill: "none" }));
  root.append(svg("text", { class: "label", x: Math.max(left + span / 2, 125), y: height - 6, "text-anchor": "middle" }, "predicted class (rows: true class), % of the row"));
  follow(root, (h, v, clientX, clientY) => {
    const p = Math.floor((h - left) / side);
    const t = Math.floor(v / side);
    if (p < 0 || t < 0 || p >= size || t >= size) return tip.hide();
    tip.show(clientX, clientY, `true: ${classes[t]}`, [["", `predicted: ${classes[p]}`, `${shown(matrix[t][p])} (${shown((100 * matrix[t][p]) / right[t], 1)} %)`]]);
  }, () => tip.hide());
  return root;
}

// A row for each method: a dot for each client, mean and standard deviation over clients, and the mean of the worst tenth.
function clientChart(width, { sets, title }) {
  const row = 46;
  const alt = `${title}: ` + sets.map(({ look, mean, deviation, worst }) => `${look.title} ${shown(mean, 1)} % on average, standard deviation ${shown(deviation, 1)}, worst tenth ${shown(worst, 1)} %`).join("; ");
  const lowest = Math.min(...sets.flatMap((set) => [set.worst, set.mean - set.deviation, ...set.each.map(([, share]) => share)]), 100);
  const xRange = [Math.max(0, Math.floor(lowest / 10) * 10), 100];
  const height = row * sets.length + 48;
  const made = picture(width, height, alt, {
    x: { range: xRange, ticks: written(ticks(...xRange, width > 420 ? 8 : 4)) },
    y: { range: [0, sets.length || 1], ticks: [] },
    label: "accuracy of the final model at a client, %",
  });
  const { root, x, box } = made;
  const middle = (n) => box.top + row * n + 30;
  sets.forEach(({ look, mean, deviation, worst, each }, n) => {
    const y = middle(n);
    const group = svg("g", { "data-line": look.title });
    group.append(svg("text", { class: "panel", x: box.left, y: y - 16 }, look.title));
    group.append(svg("line", { class: "rule", x1: box.left, x2: box.right, y1: y, y2: y }));
    // Equal accuracies lie in two rows, so that one dot does not hide another.
    each.forEach(([, share], k) => group.append(svg("circle", { class: "client", cx: x(share).toFixed(1), cy: (y + (k % 2 ? 3.5 : -3.5)).toFixed(1), r: 3, fill: look.color, "fill-opacity": 0.45 })));
    const ends = { x1: x(Math.max(xRange[0], mean - deviation)).toFixed(1), x2: x(Math.min(100, mean + deviation)).toFixed(1) };
    group.append(svg("line", { ...ends, y1: y, y2: y, stroke: look.color, "stroke-width": 2.4 }));
    group.append(marker(look, x(mean), y, 5.2), marker(look, x(worst), y, 5, true));
    root.append(group);
  });
  follow(root, (_, down, clientX, clientY) => {
    const n = Math.floor((down - box.top) / row);
    if (n < 0 || n >= sets.length) return tip.hide();
    const { look, mean, deviation, worst, each } = sets[n];
    const rows = [["mean", mean], ["standard deviation", deviation], ["worst tenth", worst]].map(([name, value]) => [look.color, name, `${shown(value, 1)}`]);
    if (each.length) rows.push([look.color, `worst client: ${each[0][0]}`, `${shown(each[0][1], 1)}`]);
    tip.show(clientX, clientY, `${look.title}, %`, rows);
  }, () => tip.hide());
  return root;
}

// Clients from left to right, classes upwards, one panel for labeled and one for unlabeled images.
function bubbleChart(width, split) {
  const { classes, shown: clients, server } = split;
  const before = server ? 2 : 0;
  const columns = clients.length + before;
  const left = 12 + 6.7 * Math.max(...classes.map((name) => clipped(name).length));
  const across = Math.min(34, (width - left - 6) / columns);
  const up = Math.max(5, Math.min(24, 320 / classes.length));
  const tall = up * classes.length;
  const height = 2 * (tall + 30) + 34;
  const alt = `Images of each client and class: ${split.totals.labeled} labeled, ${split.totals.unlabeled} unlabeled, over ${split.clients} clients.`;
  const root = canvas(Math.min(width, Math.max(330, left + across * columns + 12)), height, alt);
  const radius = 0.48 * Math.min(across, Math.max(up, 8));
  const panels = ["labeled", "unlabeled"].map((kind, n) => {
    const counts = [...(server ? [kind === "labeled" ? server : null, null] : []), ...split[kind]];
    const most = Math.max(1, ...counts.flatMap((row) => row ?? []));
    const top = n * (tall + 30) + 22;
    root.append(svg("text", { class: "panel", x: 0, y: top - 8 }, `${kind}: ${split.totals[kind].toLocaleString("en")} images, largest bubble ${most.toLocaleString("en")}`));
    root.append(svg("rect", { x: left, y: top, width: across * columns, height: tall, fill: "none", class: "rule" }));
    const every = Math.max(1, Math.ceil(13 / up));
    classes.forEach((name, c) => {
      if (c % every === 0) root.append(svg("text", { x: left - 6, y: top + tall - (c + 0.5) * up, "text-anchor": "end", "dominant-baseline": "central" }, clipped(name)));
    });
    counts.forEach((row, k) => (row ?? []).forEach((count, c) => {
      if (!count) return;
      const place = { cx: (left + (k + 0.5) * across).toFixed(1), cy: (top + tall - (c + 0.5) * up).toFixed(1) };
      root.append(svg("circle", { class: `bubble ${kind}`, ...place, r: (radius * Math.sqrt(count / most)).toFixed(2), fill: n ? "#D55E00" : "#0072B2", "fill-opacity": 0.85 }));
    }));
    return { kind, top, counts };
  });
  const every = Math.max(1, Math.ceil(24 / across));
  clients.forEach((client, n) => {
    if (n % every === 0) root.append(svg("text", { x: left + (n + before + 0.5) * across, y: height - 22, "text-anchor": "middle" }, String(client)));
  });
  if (server) root.append(svg("text", { x: left + 0.5 * across, y: height - 22, "text-anchor": "middle" }, "server"));
  const some = clients.length < split.clients ? `client (${clients.length} of ${split.clients} shown, evenly chosen)` : "client";
  root.append(svg("text", { class: "label", x: left + (across * columns) / 2, y: height - 5, "text-anchor": "middle" }, some));
  follow(root, (h, v, clientX, clientY) => {
    const k = Math.floor((h - left) / across);
    const panel = panels.find(({ top }) => v >= top && v < top + tall);
    if (!panel || k < 0 || k >= columns || (k === 1 && before)) return tip.hide();
    const c = Math.min(classes.length - 1, Math.floor((panel.top + tall - v) / up));
    const who = before && k === 0 ? "server" : `client ${clients[k - before]}`;
    const rows = panels.map(({ kind, counts }) => [kind === "labeled" ? "#0072B2" : "#D55E00", kind, counts[k] ? counts[k][c].toLocaleString("en") : "0"]);
    tip.show(clientX, clientY, `${who}, ${classes[c]}`, rows);
  }, () => tip.hide());
  return root;
}
