import assert from "node:assert/strict";
import { existsSync } from "node:fs";
import { test as run } from "node:test";

const js = new URL("../../dsv4nb/widgets/js/", import.meta.url);
const isThere = existsSync(new URL("../node_modules/marked", js));
const skip = isThere ? false : "marked is not installed: npm ci in dsv4nb/widgets";
const { block, blocks, tokensOf } = skip ? {} : await import(new URL("prose-markdown.js", js));
const test = (name, body) => run(name, { skip }, body);
const html = (text) => blocks(text).map((block) => block.html).join("");

test("a reply's markdown becomes plain elements", () => {
  assert.equal(html("# A *b*"), "<h3>A <em>b</em></h3>");
  assert.equal(html("a **b** ~~c~~ `d<e`"), "<p>a <strong>b</strong> <del>c</del> <code>d&#60;e</code></p>");
  assert.equal(html("3. x\n4. y"), '<ol start="3"><li>x</li><li>y</li></ol>');
  assert.equal(html("- x\n\n- y"), "<ul><li><p>x</p></li><li><p>y</p></li></ul>");
  assert.equal(html("- [x] a\n- [ ] b"), "<ul><li>☑ a</li><li>☐ b</li></ul>");
  assert.equal(
    html("| a | b |\n|--|-:|\n| 1<br>2 | 3 |"),
    '<table><thead><tr><th>a</th><th align="right">b</th></tr></thead>' +
      '<tbody><tr><td>1<br>2</td><td align="right">3</td></tr></tbody></table>',
  );
  assert.equal(html("> q\n\n---"), "<blockquote><p>q</p></blockquote><hr>");
  assert.equal(html("```Python title=x\na < b\n```"), '<pre><code class="language-python">a &#60; b</code></pre>');
  assert.equal(html("```<b>\nx\n```"), "<pre><code>x</code></pre>");
});

test("html is text, and an entity its sign", () => {
  assert.equal(html("a <b onclick=x>c</b>"), "<p>a &#60;b onclick=x&#62;c&#60;/b&#62;</p>");
  assert.equal(html("&amp; &lt;i&gt; & &nope"), "<p>&amp; &lt;i&gt; &#38; &#38;nope</p>");
  assert.equal(html("<div>\n*a*\n</div>"), "<p>&#60;div&#62;\n*a*\n&#60;/div&#62;</p>");
});

test("an image is its words and its address", () => {
  assert.equal(html("![a cat](http://x.y/z.png)"), "<p>a cat (http://x.y/z.png)</p>");
  assert.equal(html("![](http://x.y/z.png)"), "<p>http://x.y/z.png</p>");
});

test("only addresses of the web are links; others stay as they were written", () => {
  assert.equal(html("[a](https://x.y/?b=1&c=2)"), '<p><a href="https://x.y/?b=1&#38;c=2">a</a></p>');
  assert.equal(html("<mailto:a@b.c>"), '<p><a href="mailto:a@b.c">mailto:a@b.c</a></p>');
  const others = [
    "javascript:x", "&#106;avascript:x", "data:text/html,x", "//x.y", "/lab", "#a", "file:///x", "java\\script:x",
  ];
  for (const address of others) {
    const source = `[a](${address})`;
    assert.equal(html(source).includes("<a"), false, source);
  }
  assert.equal(html("[a][1]\n\n[1]: https://x.y"), '<p>[a][1]</p><p>[1]: <a href="https://x.y">https://x.y</a></p>');
});

test("a dollar is a formula by pandoc's rules, and never a price", () => {
  const formulas = (text) => {
    const found = html(text).matchAll(/<code class="dsv4-tex( dsv4-display)?">(.*?)<\/code>/gs);
    return [...found].map(([, display, tex]) => (display ? "D " : "") + tex);
  };
  assert.deepEqual(formulas("$x^2$ and \\(y\\), $a$-th, \\[z\\] and $$w$$"), ["x^2", "y", "a", "D z", "D w"]);
  assert.deepEqual(formulas("$$\nx\n- y\n$$\n\n\\[\na\n= b\n\\]\n"), ["D x\n- y", "D a\n= b"]);
  assert.deepEqual(formulas("$\\$5$ and $a b$"), ["\\$5", "a b"]);
  const none = [
    "$5 and $6", "$5 and $6.", "US$5, US$6", "from $20,000 to $30,000", "$ x $", "$x $", "\\$x$", "$x$5", "`$x$`",
    "$$ a\n\nb $$", "$", "$$", "$$$$", "cost: $5\n\n$6",
  ];
  for (const prices of none) {
    assert.deepEqual(formulas(prices), [], prices);
  }
});

test("the blocks of a text are the text", () => {
  for (const text of SAMPLES) assert.equal(blocks(text).map(({ raw }) => raw).join(""), text);
});

test("a block is finished when two have begun behind it, whatever comes", () => {
  for (const text of SAMPLES) {
    const whole = parts(text);
    for (let end = 1; end < text.length; end += 1) {
      const finished = parts(text.slice(0, end)).slice(0, -2);
      assert.deepEqual(finished, whole.slice(0, finished.length), JSON.stringify(text.slice(0, end)));
    }
  }
});

test("what was left off after a finished block reads the same by itself", () => {
  for (const text of SAMPLES) {
    const whole = parts(text);
    let at = 0;
    whole.forEach(({ raw }, i) => {
      assert.deepEqual(parts(text.slice(at)), whole.slice(i), JSON.stringify(text.slice(at)));
      at += raw.length;
    });
  }
});

test("floods are shown as they were written, and none takes long", () => {
  const floods = [
    "[", "*", "*a ", "_a", "`", "$", "$a ", "\\(", "\\[", "<", "<a", "![", "> ", "- ", "| ", "~", "a@", "http://", "&",
    "(", "[a](", "\\", "#", "1. ", "\n$$\n", "<!--", "[]()", "![](", "|-", "```\n",
  ];
  for (const flood of floods) {
    const began = performance.now();
    html(flood.repeat(Math.ceil(20_000 / flood.length)));
    const took = performance.now() - began;
    assert.ok(took < 1_000, `${JSON.stringify(flood)}: ${took.toFixed(0)} ms`);
  }
});

test("a long list is several, and their numbers go on", () => {
  const text = Array.from({ length: 400 }, (_, i) => `${i + 1}. item number ${i + 1} of a list`).join("\n");
  const lists = blocks(text);
  assert.ok(lists.length > 2 && lists.every(({ raw }) => raw.length < 5_000));
  assert.equal(lists.map(({ raw }) => raw).join(""), text);
  const first = lists[1].raw.split(".")[0];
  assert.ok(lists[1].html.startsWith(`<ol start="${first}">`), lists[1].html.slice(0, 40));
});

/** Blocks with the space behind them, as prose.js counts it. */
function parts(text) {
  const found = [];
  for (const token of skip ? [] : tokensOf(text)) {
    if (token.type === "space" && found.length > 0) found.at(-1).raw += token.raw;
    else found.push({ raw: token.raw, html: block(token) });
  }
  return found;
}

const SAMPLES = [
  "Hello *world*.\nA second line.\n\n# Title\ntext right below\n\n- a\n- b\n  - c\n\n  more of b\n- d\n\nend\n",
  "1. one\n\n2. two\n\n   ```py\n   x = 1\n\n   y = 2\n   ```\n3. three\n\npara\n\n2\n\n3. x\n",
  "text\n```python\ndef f(x):\n\n    return x\n```\nafter\n\n~~~\n``` inside\n~~~\n\n    indented\n\n    more\n\nlast",
  "| a | b |\n|---|--:|\n| 1 | 2 |\n| 3 | 4 |\n\nafter | no | table\n\n| x |\n| - |\nend",
  "> quote\nlazy\n>\n> - l\n\nafter\n\n***\n\nSetext\n===\n\nother\n---\n\nx\n",
  "before\n$$\na + b\n- c\n$$\nafter $x$ and $5\n\n\\[\ny\n\\] tail\n\nz\n\n$$ w $$\n\n$$u\n\nv$$\n",
  "<div>\nraw *text*\n</div>\n\n<!-- a\n\nb -->\n\n<script>\n1\n\n2\n</script>\n\nafter <b>x</b>\n",
  "<details>\n<summary>s</summary>\n\nbody\n\n</details>\nend",
  "- a\n\n- b\n\n\n- c\n\n1) x\n2) y\n\n* s\n+ t\n\n- [x] done\n- [ ] not\n\ntext\n\n-\n\n--\n\n---\n",
  "\n\n  lead\n\n[1]: http://x.y\n[a][1] and [b]\n\nhttp://x.y/z www.x.y a@b.co\n\n![i](u)\n\nhard  \nbreak\\\nagain\n",
  "a\tb\n\n\tcode\n\n- x\n\n\ty\n\n12. z\n\ttab\n\ntail",
];
