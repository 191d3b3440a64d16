import { readFile } from "node:fs/promises";

// What is in stock, by article: (count, price) as the files have it.
export class Stock {
  #articles = new Map();

  constructor(options = {}) {
    this.options = { currency: "EUR", strict: false, ...options };
  }

  static async load(path) {
    const stock = new Stock();
    for (const line of (await readFile(path, "utf8")).split("\n")) {
      const [name, count] = line.split(/[;,]\s*/);
      if (!name) {
        continue;
      }
      stock.add(name, Number(count ?? 0));
    }
    return stock;
  }

  add(name, count = 1) {
    try {
      this.#articles.set(name, (this.#articles.get(name) || 0) + count);
    } catch (error) {
      console.error(`cannot add ${name} (${count}): ${error.message}`);
      throw error;
    } finally {
      this.changed = true;
    }
  }

  /**
   * The articles of which there are few: 1) by count, 2) by name.
   * @param {number} least
   */
  scarce(least) {
    return [...this.#articles]
      .filter(([, count]) => count < least)
      .sort(([a, m], [b, n]) => m - n || a.localeCompare(b))
      .map(([name]) => name);
  }
}

function report(stock, write = console.log) {
  stock.scarce(3).forEach((name) => {
    write("- " + name + " :(");
  });

  const total = stock.count === undefined
    ? "unknown"
    : stock.count;
  write(`total: ${total}`);
}

switch (process.argv[2]) {
  case "report":
    report(await Stock.load("stock.csv"));
    break;
  default:
    console.log('usage: stock report');
}
