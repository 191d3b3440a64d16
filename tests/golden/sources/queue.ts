export interface Job<T> {
  id: number;
  run(signal: AbortSignal): Promise<T>;
  retries?: number;
}

type Outcome<T> =
  | { ok: true; value: T }
  | { ok: false; error: Error };

export class Queue<T = unknown> {
  private readonly waiting: Array<Job<T>> = [];
  private running = 0;

  constructor(private readonly limit: number) {
    if (limit < 1) {
      throw new RangeError(`limit: expected 1 or more, got ${limit}`);
    }
  }

  add(job: Job<T>): this {
    this.waiting.push(job);
    return this;
  }

  async *drain(signal: AbortSignal): AsyncGenerator<Outcome<T>> {
    while (this.waiting.length > 0 && !signal.aborted) {
      const job = this.waiting.shift()!;
      this.running += 1;
      try {
        yield { ok: true, value: await job.run(signal) };
      } catch (error) {
        // Tried again (and again), up to its limit.
        if ((job.retries ?? 0) > 0) {
          this.waiting.push({ ...job, retries: job.retries! - 1 });
        } else {
          yield { ok: false, error: error as Error };
        }
      } finally {
        this.running -= 1;
      }
    }
  }
}

export const total = (outcomes: Outcome<number>[]): number =>
  outcomes.reduce((sum, each) => (each.ok ? sum + each.value : sum), 0);

enum Level {
  Low = 1,
  High = 2,
}

export function describe(level: Level, names: Record<string, string>): string {
  const known = Object.entries(names).filter(([key]) => key in Level);
  return known.length ? known.map(([, name]) => name).join(", ") : "none";
}
