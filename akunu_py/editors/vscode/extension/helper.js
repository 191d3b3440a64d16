// Exchanges JSON lines with one `akunu complete` process. Independent of VS Code.
'use strict'

const { spawn } = require('node:child_process')
const readline = require('node:readline')

// Where the sent text before the cursor at `offset` starts, for at most `longest` characters. It
// moves in steps, so that the helper's caches stay valid while the user types.
function windowStart(offset, longest) {
  const step = longest / 2
  return offset <= longest ? 0 : Math.floor((offset - step) / step) * step
}

const END_MS = 5000 // time limit for the end of a helper, as long as VS Code's for extensions

class Helper {
  // notify: gets each message for the user once. onState: gets the state of the helper: idle,
  // loading, ready, or failed and the reason. now: returns milliseconds.
  constructor(command, notify, onState = () => {}, now = Date.now) {
    this.now = now
    this.onState = onState
    this.command = command
    this.notify = notify
    this.notified = new Set()
    this.waiting = new Map() // id -> {resolve, onText}
    this.lastId = 0
    this.process = null
    this.failures = 0 // since the last answer
    this.startAt = 0 // earliest start; the pause increases after each failure
  }

  // The reply to a request, or null if it was cancelled, superseded or failed. onCancel: gets a
  // function that cancels it. onText: gets parts of the text as they arrive, and the id of the reply.
  ask(request, onCancel, onText = () => {}) {
    if (!this.start()) return Promise.resolve(null)
    const id = ++this.lastId
    return new Promise((resolve) => {
      this.waiting.set(id, { resolve, onText })
      this.send({ id, stream: true, ...request })
      onCancel(() => {
        if (this.waiting.has(id)) this.send({ cancel: id })
      })
    })
  }

  // Requests a prefill while no request waits.
  readAhead(request) {
    if (this.start()) this.send({ id: ++this.lastId, ...request, max_tokens: 0 })
  }

  // Reports that a reply was accepted.
  accepted(id) {
    if (this.process) this.send({ accepted: id })
  }

  start() {
    if (this.process) return true
    if (this.now() < this.startAt) return false
    let lastError = ''
    const child = spawn(this.command[0], this.command.slice(1))
    this.process = child
    child.stdin.on('error', () => {}) // 'close' reports its end
    const missing = `${this.command[0]}: no such program; install akunu or set akunu.command`
    child.on('error', ({ code, message }) => this.end(child, code === 'ENOENT' ? missing : message))
    child.on('close', (code, signal) => {
      this.end(child, code || signal ? lastError || `it ended with ${code || signal}` : null)
    })
    readline.createInterface({ input: child.stderr }).on('line', (line) => {
      lastError = line.replace(/^akunu: /, '')
    })
    readline.createInterface({ input: child.stdout }).on('line', (line) => this.answered(line))
    return true
  }

  answered(line) {
    let reply
    try {
      reply = JSON.parse(line)
    } catch {
      this.notifyOnce(`not an answer: ${line.slice(0, 60)}`)
      return
    }
    const asked = this.waiting.get(reply.id)
    if (reply.hello) return this.onState(reply.hello.ready ? 'ready' : 'loading')
    if (reply.status) return this.onState(reply.status)
    if (reply.delta) return asked && asked.onText(reply.delta, reply.id)
    this.waiting.delete(reply.id)
    if (reply.error) {
      this.notifyOnce(reply.error)
    } else {
      this.failures = 0
      this.notified.clear()
      this.onState('ready')
    }
    const whole = !reply.error && reply.finish_reason !== 'cancelled'
    if (asked) asked.resolve(whole ? reply : null)
  }

  send(message) {
    // The helper rejects half a character, which a text may begin or end with where it was cut.
    const whole = (_, value) => (typeof value === 'string' ? value.replace(/\p{Surrogate}/gu, '\ufffd') : value)
    this.process.stdin.write(JSON.stringify(message, whole) + '\n')
  }

  end(child, failure) {
    if (this.process !== child) return
    this.process = null
    for (const { resolve } of this.waiting.values()) resolve(null)
    this.waiting.clear()
    this.onState('idle')
    if (failure) {
      this.startAt = this.now() + Math.min(60000, 1000 * 2 ** this.failures++)
      this.notifyOnce(failure)
    }
  }

  notifyOnce(message) {
    this.onState('failed', message)
    if (!this.notified.has(message)) this.notify(message)
    this.notified.add(message)
  }

  dispose() {
    const child = this.process
    if (!child) return
    this.end(child, null)
    child.stdin.end() // it exits after it has saved its counts
    const timer = setTimeout(() => child.kill(), END_MS)
    child.on('close', () => clearTimeout(timer))
  }
}

module.exports = { Helper, windowStart }
