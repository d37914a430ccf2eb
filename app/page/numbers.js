// Numbers as people read them: a value, a space, a unit.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (number) => plain.format(number ?? 0);
export const percent = (share) => `${plain.format(share * 100)} %`;
export const rate = (perSecond) => `${(perSecond > 0 && perSecond < 10 ? fine : plain).format(perSecond)} tok/s`;

export function seconds(value) {
  if (value >= 10) return `${fine.format(value)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  return `${(value > 0 && value < 0.01 ? fine : plain).format(value * 1000)} ms`;
}

// On a scale: round numbers, and no more of the unit than is needed.
export const rateMark = (perSecond) => perSecond.toLocaleString("en");
export const secondsMark = (value) => (value >= 1 ? `${value} s` : `${Number((value * 1000).toPrecision(3))} ms`);

export function bytes(number) {
  const power = Math.min(3, Math.floor(Math.log2(number || 1) / 10));
  return `${(power ? fine : plain).format(number / 1024 ** power).replace(".0", "")} ${["B", "KiB", "MiB", "GiB"][power]}`;
}
