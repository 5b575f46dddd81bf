// Bundles each panel into one self-contained module and style sheet: `npm ci && npm run build`. Without arguments into
// static/; a folder may be given instead.

import { readdirSync } from "node:fs";
import { build } from "esbuild";

const here = import.meta.dirname;
// a panel has a style sheet of its name
const panels = readdirSync(`${here}/css`)
  .filter((name) => name.endsWith(".css") && name !== "theme.css")
  .map((name) => name.slice(0, -4));

await build({
  absWorkingDir: here,
  entryPoints: panels.flatMap((name) => [
    { in: `js/${name}.js`, out: name },
    { in: `css/${name}.css`, out: name },
  ]),
  outdir: process.argv[2] ?? "static",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
});
