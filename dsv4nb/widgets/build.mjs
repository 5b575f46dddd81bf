// Bundles each panel into one self-contained module and style sheet: `npm ci && npm run build`. Without arguments into
// static/; a folder may be given instead.

import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { build } from "esbuild";

const here = import.meta.dirname;
const shared = ["theme.css", "prose.css"];
// a panel has a style sheet of its name
const panels = readdirSync(`${here}/css`)
  .filter((name) => name.endsWith(".css") && !shared.includes(name))
  .map((name) => name.slice(0, -4));

/** Libraries name their pages in messages to developers; a bundle names no address that is not a namespace's. */
const withoutAddresses = {
  name: "without-addresses",
  setup(build_) {
    build_.onLoad({ filter: /node_modules.(marked|highlight\.js).*\.m?js$/ }, ({ path }) => ({
      contents: readFileSync(path, "utf8").replace(/https:\/\/github\.com\/[\w./#-]*\w/g, "its page"),
    }));
  },
};

const folder = resolve(here, process.argv[2] ?? "static");
const { metafile } = await build({
  absWorkingDir: here,
  entryPoints: [
    ...panels.flatMap((name) => [
      { in: `js/${name}.js`, out: name },
      { in: `css/${name}.css`, out: name },
    ]),
    { in: "js/maths.js", out: "maths" }, // sent to a page that meets a formula
  ],
  outdir: folder,
  metafile: true,
  plugins: [withoutAddresses],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
});

// the bundles leave out what the libraries' licences want to be read
const libraries = new Set(
  Object.keys(metafile.inputs).flatMap((path) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1] ?? []),
);
const licences = [...libraries].sort().map((name) => {
  const { version } = JSON.parse(readFileSync(`${here}/node_modules/${name}/package.json`, "utf8"));
  return `${name} ${version}\n\n${readFileSync(`${here}/node_modules/${name}/LICENSE`, "utf8").trim()}\n`;
});
writeFileSync(`${folder}/LICENSES.txt`, licences.join(`\n${"-".repeat(80)}\n\n`));
