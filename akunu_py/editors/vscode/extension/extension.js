// Inline completion in VS Code from `akunu complete`.
'use strict'

const vscode = require('vscode')
const { Helper, windowStart } = require('./helper.js')

const MAX_CHARACTERS = 200000 // on either side of the cursor
const MAX_FILES = 8
const MAX_FILE_CHARACTERS = 100000

let helper = null
let used = [] // documents, the one shown last first

function settings() {
  return vscode.workspace.getConfiguration('akunu')
}

function restart() {
  if (helper) helper.dispose()
  helper = new Helper(settings().get('command'), (message) => {
    vscode.window.showWarningMessage(`akunu: ${message}`)
  })
}

// Whether the keyboard rests for `ms` milliseconds before the request is withdrawn.
function rests(ms, token) {
  return new Promise((resolve) => {
    const timer = setTimeout(() => resolve(true), ms)
    token.onCancellationRequested(() => {
      clearTimeout(timer)
      resolve(false)
    })
  })
}

function otherFiles(document) {
  const files = []
  for (const other of used) {
    if (other === document || other.isClosed || files.length === MAX_FILES) continue
    const text = other.getText()
    if (text && text.length <= MAX_FILE_CHARACTERS) files.push({ path: other.fileName, text })
  }
  return files
}

// `chosen`, the entry of the suggestion menu that is not inserted yet, counts as typed.
function requestAt(document, position, chosen) {
  const text = document.getText()
  const start = document.offsetAt(chosen ? chosen.range.start : position)
  const end = document.offsetAt(chosen ? chosen.range.end : position)
  const request = {
    channel: 'vscode',
    prefix: text.slice(windowStart(start, MAX_CHARACTERS), start) + (chosen ? chosen.text : ''),
    suffix: text.slice(end, end + MAX_CHARACTERS),
    path: document.fileName,
    language: document.languageId,
    files: otherFiles(document),
    time_ms: settings().get('timeMs'),
  }
  const lines = settings().get('maxLines')
  if (lines > 0) request.max_lines = lines
  return request
}

const provider = {
  async provideInlineCompletionItems(document, position, context, token) {
    if (!settings().get('enabled') || !(await rests(settings().get('delay'), token))) return []
    const chosen = context.selectedCompletionInfo
    const reply = await helper.ask(requestAt(document, position, chosen), (cancel) => {
      token.onCancellationRequested(cancel)
    })
    if (!reply || !reply.text.trim() || token.isCancellationRequested) return []
    const range = chosen ? chosen.range : new vscode.Range(position, position)
    return [new vscode.InlineCompletionItem((chosen ? chosen.text : '') + reply.text, range)]
  },
}

function shown(editor) {
  if (!editor || editor.document.uri.scheme === 'output') return
  used = [editor.document, ...used.filter((other) => other !== editor.document)].slice(0, 50)
}

function activate(context) {
  restart()
  vscode.window.visibleTextEditors.forEach(shown)
  shown(vscode.window.activeTextEditor)
  context.subscriptions.push(
    vscode.window.onDidChangeActiveTextEditor(shown),
    vscode.commands.registerCommand('akunu.restart', restart),
    vscode.workspace.onDidChangeConfiguration((change) => {
      if (change.affectsConfiguration('akunu.command')) restart()
    }),
    vscode.languages.registerInlineCompletionItemProvider({ pattern: '**' }, provider),
  )
}

function deactivate() {
  helper.dispose()
}

module.exports = { activate, deactivate }
