// Shows the next edit that the model predicts next to the changed lines, and applies it.
'use strict'

const vscode = require('vscode')
const { RecentEdits } = require('./recent_edits.js')

const PAUSE_MS = 200 // without a change, before a request

// The changed words of two lines: {from, oldEnd}, as characters of the old one.
function changedWords(before, after) {
  const inWord = /[\p{L}\p{N}_]/u
  const shorter = Math.min(before.length, after.length)
  let from = 0
  while (from < shorter && before[from] === after[from]) from++
  while (from > 0 && inWord.test(before[from - 1])) from--
  let same = 0 // characters at the end
  while (same < shorter - from && before.at(-1 - same) === after.at(-1 - same)) same++
  while (same > 0 && inWord.test(before.at(-same))) same--
  return { from, oldEnd: before.length - same }
}

const keyOf = (edit) => JSON.stringify([edit.first, edit.last, edit.lines])

class NextEdit {
  // ask(document, position, edits, onCancel): returns the helper's reply or null.
  // accepted(id): reports an applied edit.
  constructor(ask, accepted) {
    this.ask = ask
    this.accepted = accepted
    this.recent = new RecentEdits()
    this.shown = null // {editor, version, edit, id}
    this.made = null // the last applied edit: {document, key, before}; before: the text without it
    this.undone = new Set() // keys of edits that the user undid
    this.timer = null
    this.cancel = () => {}
    this.going = vscode.window.createTextEditorDecorationType({
      backgroundColor: new vscode.ThemeColor('diffEditor.removedLineBackground'),
    })
    this.coming = vscode.window.createTextEditorDecorationType({
      after: { color: new vscode.ThemeColor('editorGhostText.foreground'), margin: '0 0 0 2em' },
    })
  }

  opened(document) {
    this.recent.opened(document.fileName, document.getText())
  }

  changed(document, reason) {
    const undo = reason === vscode.TextDocumentChangeReason.Undo
    const { made } = this
    if (undo && made && made.document === document && document.getText() === made.before) {
      this.undone.add(made.key)
      this.made = null
    }
    this.recent.changed(document.fileName, document.getText())
    this.hide()
    const editor = vscode.window.activeTextEditor
    if (!editor || editor.document !== document) return
    this.timer = setTimeout(() => this.predict(editor), PAUSE_MS)
  }

  async predict(editor) {
    const { document } = editor
    const version = document.version
    const edits = this.recent.list()
    if (!edits.length) return
    const onCancel = (cancel) => (this.cancel = cancel)
    const reply = await this.ask(document, editor.selection.active, edits, onCancel)
    const wanted = reply && reply.edit && !this.undone.has(keyOf(reply.edit))
    if (wanted && document.version === version) this.show(editor, reply)
  }

  // Marks the removed words and shows the new lines. An edit outside the window is only announced.
  show(editor, { edit, id }) {
    this.hide()
    this.shown = { editor, version: editor.document.version, edit, id }
    const lineRange = (row) => editor.document.lineAt(row).range
    this.setContext(true)
    if (!this.isVisible(editor, edit)) {
      const { line } = editor.selection.active
      const text = `${edit.first > line ? '↓' : '↑'} next edit in line ${edit.first + 1}`
      editor.setDecorations(this.coming, [
        { range: lineRange(line), renderOptions: { after: { contentText: text } } },
      ])
      return
    }
    const rows = []
    for (let row = edit.first; row < edit.last; row++) rows.push(row)
    const removed = rows.map((row, number) => {
      if (number >= edit.lines.length) return lineRange(row)
      const { from, oldEnd } = changedWords(editor.document.lineAt(row).text, edit.lines[number])
      return new vscode.Range(new vscode.Position(row, from), new vscode.Position(row, oldEnd))
    })
    editor.setDecorations(this.going, removed)
    // One new line after each old one; the remaining new lines after the last.
    const at = rows.length ? rows : [Math.max(0, edit.first - 1)]
    const texts = edit.lines.slice(0, at.length)
    const more = edit.lines.slice(at.length)
    if (texts.length && more.length) texts[texts.length - 1] += more.map((line) => ' ⏎ ' + line).join('')
    const coming = texts.map((text, number) => ({
      range: lineRange(at[number]),
      renderOptions: { after: { contentText: (rows.length ? '→ ' : '⏎ ') + text } },
    }))
    editor.setDecorations(this.coming, coming)
  }

  isVisible(editor, { first, last }) {
    const end = Math.max(first, last - 1)
    return editor.visibleRanges.some((range) => range.start.line <= first && end <= range.end.line)
  }

  hide() {
    clearTimeout(this.timer)
    this.cancel()
    this.cancel = () => {}
    if (!this.shown) return
    const { editor } = this.shown
    this.shown = null
    editor.setDecorations(this.going, [])
    editor.setDecorations(this.coming, [])
    this.setContext(false)
  }

  // Moves the cursor to the shown edit if it is outside the window. Otherwise applies it as one undo
  // step, and moves the cursor to its end.
  async accept() {
    if (!this.shown || this.shown.editor.document.version !== this.shown.version) return
    const { editor, edit, id } = this.shown
    const { document } = editor
    const { first, last, lines } = edit
    this.hide()
    if (!this.isVisible(editor, edit)) {
      const start = new vscode.Position(Math.min(first, document.lineCount - 1), 0)
      const range = new vscode.Range(start, start)
      editor.selection = new vscode.Selection(start, start)
      editor.revealRange(range, vscode.TextEditorRevealType.InCenter)
      this.showWhenVisible(editor, { edit, id })
      return
    }
    const end = document.lineAt(document.lineCount - 1).range.end
    let range = new vscode.Range(new vscode.Position(first, 0), last < document.lineCount ? new vscode.Position(last, 0) : end)
    let text = lines.map((line) => line + '\n').join('')
    if (last >= document.lineCount) {
      if (first > 0) range = new vscode.Range(document.lineAt(first - 1).range.end, end)
      text = lines.map((line, number) => (first > 0 || number ? '\n' : '') + line).join('')
    }
    const before = document.getText()
    const made = await editor.edit((builder) => builder.replace(range, text))
    if (!made) return
    const row = Math.max(0, first + lines.length - 1)
    const cursor = document.lineAt(Math.min(row, document.lineCount - 1)).range.end
    editor.selection = new vscode.Selection(cursor, cursor)
    editor.revealRange(new vscode.Range(cursor, cursor))
    this.made = { document, key: keyOf(edit), before }
    this.accepted(id)
  }

  // VS Code reports the new lines of the window later.
  showWhenVisible(editor, reply) {
    const { version } = editor.document
    const listener = vscode.window.onDidChangeTextEditorVisibleRanges((change) => {
      if (change.textEditor !== editor) return
      listener.dispose()
      if (editor.document.version === version) this.show(editor, reply)
    })
  }

  setContext(shown) {
    vscode.commands.executeCommand('setContext', 'akunu.nextEditShown', shown)
  }

  dispose() {
    this.hide()
    this.going.dispose()
    this.coming.dispose()
  }
}

module.exports = { NextEdit }
