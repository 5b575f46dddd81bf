// Bundles each panel into one self-contained module: `npm ci && npm run build`. A folder may be given instead of static/.

import { build } from "esbuild";

await build({
  absWorkingDir: import.meta.dirname,
  entryPoints: ["js/chat.js", "js/acceptance.js"],
  outdir: process.argv[2] ?? "static",
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
});
