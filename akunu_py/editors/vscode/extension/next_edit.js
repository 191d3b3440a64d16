// Shows the next edit that the model predicts next to the changed lines, and applies it.
'use strict'

const vscode = require('vscode')
const { RecentEdits } = require('./recent_edits.js')

const PAUSE_MS = 200 // without a change, before a request

class NextEdit {
  // ask(document, position, edits, onCancel): returns the helper's reply or null.
  // accepted(id, characters): reports an applied edit.
  constructor(ask, accepted) {
    this.ask = ask
    this.accepted = accepted
    this.recent = new RecentEdits()
    this.shown = null // {editor, version, edit, id}
    this.timer = null
    this.cancel = () => {}
    this.going = vscode.window.createTextEditorDecorationType({
      isWholeLine: true,
      backgroundColor: new vscode.ThemeColor('diffEditor.removedLineBackground'),
    })
    this.coming = vscode.window.createTextEditorDecorationType({
      after: { color: new vscode.ThemeColor('editorGhostText.foreground'), margin: '0 0 0 2em' },
    })
  }

  opened(document) {
    this.recent.opened(document.fileName, document.getText())
  }

  changed(document) {
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
    if (reply && reply.edit && document.version === version) this.show(editor, reply)
  }

  show(editor, { edit, id }) {
    this.hide()
    this.shown = { editor, version: editor.document.version, edit, id }
    const rows = []
    for (let row = edit.first; row < edit.last; row++) rows.push(row)
    const lineRange = (row) => editor.document.lineAt(row).range
    editor.setDecorations(this.going, rows.map(lineRange))
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
    this.setContext(true)
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

  // Applies the shown edit as one undo step, and moves the cursor to its end.
  async accept() {
    if (!this.shown || this.shown.editor.document.version !== this.shown.version) return
    const { editor, edit, id } = this.shown
    const { document } = editor
    const { first, last, lines } = edit
    this.hide()
    const end = document.lineAt(document.lineCount - 1).range.end
    let range = new vscode.Range(new vscode.Position(first, 0), last < document.lineCount ? new vscode.Position(last, 0) : end)
    let text = lines.map((line) => line + '\n').join('')
    if (last >= document.lineCount) {
      if (first > 0) range = new vscode.Range(document.lineAt(first - 1).range.end, end)
      text = lines.map((line, number) => (first > 0 || number ? '\n' : '') + line).join('')
    }
    const made = await editor.edit((builder) => builder.replace(range, text))
    if (!made) return
    const row = Math.max(0, first + lines.length - 1)
    const cursor = document.lineAt(Math.min(row, document.lineCount - 1)).range.end
    editor.selection = new vscode.Selection(cursor, cursor)
    editor.revealRange(new vscode.Range(cursor, cursor))
    this.accepted(id, [...lines.join('\n')].length + 1)
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
