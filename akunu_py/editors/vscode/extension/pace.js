// The delay before a request, from the user's typing speed and the time until an answer. Independent of
// VS Code.
'use strict'

const PAUSE_MS = 1500 // a longer pause between two keys ends a rhythm
const NEWEST = 0.3 // weight of the last value in an average
const LOADING_MS = 5000 // a longer latency is that of a model being loaded
const BATTERY = 2 // times the shortest delay

const average = (old, value) => (old ? old + NEWEST * (value - old) : value)

class Pace {
  constructor(now = Date.now) {
    this.now = now
    this.lastKey = -Infinity
    this.interval = 0 // average milliseconds between two keys, 0 after a pause
    this.latency = 0 // average milliseconds until the first text
    this.unanswered = -Infinity // start of the last request without a text
    this.onBattery = false
  }

  key() {
    const gap = this.now() - this.lastKey
    this.lastKey = this.now()
    this.interval = gap < PAUSE_MS ? average(this.interval, gap) : 0
  }

  // A request is sent. If the one before has no text yet, its latency is at least its age. Returns a
  // function to call when the first text arrives.
  asked() {
    const start = this.now()
    const age = start - this.unanswered
    if (age > this.latency && age < PAUSE_MS) this.latency = average(this.latency, age)
    this.unanswered = start
    return () => {
      this.unanswered = -Infinity
      const ms = this.now() - start
      if (ms < LOADING_MS) this.latency = average(this.latency, ms)
    }
  }

  // Milliseconds without a key before a request. If the next key usually comes before the answer,
  // only a pause longer than usual is worth a request.
  delay(least, most) {
    const shortest = least * (this.onBattery ? BATTERY : 1)
    if (!this.interval || this.interval > shortest + this.latency) return shortest
    return Math.max(shortest, Math.min(most, Math.round(1.3 * this.interval)))
  }
}

module.exports = { Pace }
