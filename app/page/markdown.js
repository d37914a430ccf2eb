// Markdown to nodes. No text of a model ever becomes HTML: it is parsed to tokens, and each token makes one node of a
// kind that is listed here. Whatever is not listed stays text.

const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote em strong s a table thead tbody tr th td".split(" "),
);
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

const parser = window.markdownit({ html: false, linkify: true });
parser.disable("image"); // it would be fetched from elsewhere: what is left of it is a link
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });

const sources = new WeakMap();

/** Make `into` show `text`. Blocks that are as they were stay the same nodes, so that a selection outlives a token. */
export function render(text, into) {
  const lines = text.split("\n");
  const found = blocks(parser.parse(text, {}));
  while (into.childNodes.length > found.length) into.lastChild.remove();
  found.forEach((tokens, index) => {
    const source = lines.slice(...tokens[0].map).join("\n");
    const old = into.childNodes[index];
    if (old && sources.get(old) === source) return;
    const made = document.createElement("div");
    build(tokens, made);
    sources.set(made, source);
    if (old) old.replaceWith(made);
    else into.append(made);
  });
}

/** The tokens of each block of the outermost level. */
function blocks(tokens) {
  const found = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) found.push([]);
    found.at(-1).push(token);
  }
  return found;
}

function build(tokens, parent) {
  const open = [parent];
  for (const token of tokens) {
    const top = open.at(-1);
    if (token.type === "inline") build(token.children, top);
    else if (token.nesting === 1) open.push(token.hidden ? top : element(token, top));
    else if (token.nesting === -1) open.pop();
    else top.append(leaf(token));
  }
}

function element(token, parent) {
  const isKnown = TAGS.has(token.tag);
  // An answer's headings stand below those of the page.
  const tag = isKnown ? token.tag.replace(/^h([1-6])$/, (_, level) => `h${Math.min(6, Number(level) + 2)}`) : "span";
  const node = document.createElement(tag);
  if (tag === "a") aim(node, token.attrGet("href"));
  if (tag === "ol" && token.attrGet("start")) node.start = Number(token.attrGet("start"));
  const align = /^text-align:(left|right|center)$/.exec(token.attrGet("style") ?? "");
  if (align) node.style.textAlign = align[1];
  parent.append(node);
  return node;
}

function leaf(token) {
  switch (token.type) {
    case "softbreak":
      return "\n";
    case "hardbreak":
      return document.createElement("br");
    case "hr":
      return document.createElement("hr");
    case "code_inline":
      return code(token.content);
    case "fence":
    case "code_block": {
      const block = document.createElement("pre");
      block.tabIndex = 0; // so that the keyboard can scroll it
      block.append(code(token.content));
      return block;
    }
    default:
      return token.content;
  }
}

function code(text) {
  const node = document.createElement("code");
  node.textContent = text;
  return node;
}

/** A link that leads out only by a scheme that cannot run anything, in a tab that knows nothing of this one. */
function aim(node, href) {
  if (!URL.canParse(href) || !SCHEMES.has(new URL(href).protocol)) return;
  node.href = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
}
