// Bundles Observable Plot for the pages: npm ci --ignore-scripts && npm run build
//
// It writes ../../src/halfmoon/report/web/plot.js, its licenses (THIRD-PARTY.txt) and its checksum (bundle.sha256).
// package-lock.json pins every package and its checksum, so the same bytes result on every machine; a test compares the
// file with bundle.sha256. Neither users nor the tests need node.

import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const root = fileURLToPath(new URL("../../", import.meta.url));
const output = `${root}src/halfmoon/report/web/plot.js`;

// Parts of the library that no page of halfmoon uses, such as maps, are replaced by the files of without/, which have the
// same exports and no code. That makes the bundle a third smaller.
const replacements = readdirSync(`${here}without`);
const without = {
  name: "without",
  setup(bundler) {
    bundler.onLoad({ filter: /[/\\]node_modules[/\\]/ }, ({ path }) => {
      const parts = path.split(/[/\\]node_modules[/\\]/).at(-1).split(/[/\\]/);
      // The main file of a package, as d3-geo/dist/d3-geo.mjs, or a file of Plot, as @observablehq/plot/src/marks/tip.js.
      const name = parts[0] === "@observablehq" ? `plot-${parts.at(-1)}` : `${parts[0]}.js`;
      return replacements.includes(name) ? { contents: readFileSync(`${here}without/${name}`, "utf8"), loader: "js" } : null;
    });
  },
};

const result = await build({
  absWorkingDir: here, entryPoints: ["marks.js"], bundle: true, minify: true, format: "iife", globalName: "Plot", target: "es2022",
  charset: "utf8", legalComments: "none", metafile: true, write: false, plugins: [without], logLevel: "warning",
});

// The packages whose code is in the bundle, and their licenses: the license has to be in every copy, also in a report.
const [{ inputs }] = Object.values(result.metafile.outputs);
const used = Object.entries(inputs).filter(([, { bytesInOutput }]) => bytesInOutput > 0).map(([path]) => path);
const names = [...new Set(used
  .map((path) => path.match(/node_modules\/((?:@[^/]+\/)?[^/]+)/)?.[1])
  .filter((name) => name && !replacements.includes(`${name}.js`)))].sort();
const holders = [];
const texts = new Set();
for (const name of names) {
  const { version, license } = JSON.parse(readFileSync(`${here}node_modules/${name}/package.json`, "utf8"));
  const [copyright, ...text] = readFileSync(`${here}node_modules/${name}/LICENSE`, "utf8").trim().split("\n");
  if (license !== "ISC") throw new Error(`${name}: its license is ${license}; the notice below is written for ISC`);
  holders.push(`${name} ${version}: ${copyright}`);
  texts.add(text.join(" ").replaceAll(/\s+/g, " ").trim());
}
if (texts.size !== 1) throw new Error(`the packages have different license texts: ${[...texts].join("; ")}`);
const lines = [""];
for (const word of [...texts][0].split(" ")) {
  if (lines.at(-1).length + word.length > 118) lines.push("");
  lines.push(`${lines.pop()} ${word}`.trimStart());
}
const notice = [
  "The charts of halfmoon's pages are drawn by Observable Plot. The file plot.js of the package halfmoon.report has these",
  "packages, without the parts that no page uses. They are under the ISC license:", ...holders, "", ...lines,
];
writeFileSync(`${root}THIRD-PARTY.txt`, `${notice.join("\n")}\n`);
const text = `/*!\n${notice.join("\n")}\n*/\n${result.outputFiles[0].text}`;
writeFileSync(output, text);
writeFileSync(`${here}bundle.sha256`, `${createHash("sha256").update(text).digest("hex")}  src/halfmoon/report/web/plot.js\n`);
console.log(`${output}: ${Buffer.byteLength(text).toLocaleString("en")} bytes of ${names.length} packages`);
