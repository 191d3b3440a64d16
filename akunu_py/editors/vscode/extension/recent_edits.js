// Recent edits, collected while the user types. Independent of VS Code.
'use strict'

const LATEST = 6 // maximum recent edits
const CONTEXT = 3 // lines around an edit
const NEAR = 8 // lines; changes within this distance belong to the same edit

// The change from one text to another, with some lines around it, or null: {path, before, after, line}.
function difference(path, before, after) {
  if (before === after) return null
  const old = before.split('\n')
  const now = after.split('\n')
  const most = Math.min(old.length, now.length)
  let ahead = 0
  while (ahead < most && old[ahead] === now[ahead]) ahead++
  let behind = 0
  while (behind < most - ahead && old[old.length - 1 - behind] === now[now.length - 1 - behind]) behind++
  const line = Math.max(0, ahead - CONTEXT)
  const rest = Math.max(0, behind - CONTEXT)
  const piece = (lines) => lines.slice(line, lines.length - rest).join('\n') + (rest ? '\n' : '')
  return { path, before: piece(old), after: piece(now), line }
}

const lines = (text) => text.split('\n').length - 1

class RecentEdits {
  constructor() {
    this.texts = new Map() // of buffers, by path
    this.done = []
    this.base = null // {path, text} before the current edit
  }

  opened(path, text) {
    this.texts.set(path, text)
  }

  changed(path, text) {
    const before = this.texts.has(path) ? this.texts.get(path) : text
    const current = this.current()
    this.texts.set(path, text)
    const step = difference(path, before, text)
    if (!step) return
    if (current && current.path === path) {
      const end = current.line + lines(current.after)
      if (current.line - NEAR <= step.line && step.line + lines(step.before) <= end + NEAR) return
    }
    if (current) this.done = [...this.done, current].slice(-LATEST)
    this.base = { path, text: before }
  }

  // The oldest first.
  list() {
    const current = this.current()
    return [...this.done, ...(current ? [current] : [])].slice(-LATEST)
  }

  current() {
    return this.base && difference(this.base.path, this.base.text, this.texts.get(this.base.path))
  }
}

module.exports = { RecentEdits, difference }
