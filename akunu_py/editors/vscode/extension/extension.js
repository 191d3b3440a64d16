// Inline completion in VS Code from `akunu complete`.
'use strict'

const vscode = require('vscode')
const { Helper, windowStart } = require('./helper.js')
const { NextEdit } = require('./next_edit.js')

const MAX_CHARACTERS = 200000 // on either side of the cursor
const MAX_FILES = 8
const MAX_FILE_CHARACTERS = 100000
const FIRST_LINE_MS = 50 // before a first line is shown without the rest
const ALTERNATIVES = { count: 2, temperature: 0.8 } // for an explicit request
const REST_MS = 500 // without cursor movement, before a prefill

let helper = null
let statusBar = null
let used = [] // documents, the last shown one first
let resting = null
let askedAgain = false // the next request is for the rest of the shown text
let nextEdit = null // set to predict the next edit instead of text at the cursor
let given = null // the last ghost: {document, end}; end: the text up to its end after acceptance

function settings() {
  return vscode.workspace.getConfiguration('akunu')
}

function restart() {
  if (helper) helper.dispose()
  helper = new Helper(
    settings().get('command'),
    (message) => vscode.window.showWarningMessage(`akunu: ${message}`),
    showState,
  )
}

function showState(state, why) {
  const icons = { loading: '$(sync~spin) ', failed: '$(warning) ' }
  statusBar.text = `${icons[state] || ''}akunu`
  statusBar.tooltip = `akunu: ${state === 'loading' ? 'the model is being loaded' : why || state}`
}

function isEnabled(document) {
  const ofType = settings().get('filetypes')[document.languageId]
  return ofType === undefined ? settings().get('enabled') : ofType
}

// Whether no key is pressed for `ms` milliseconds before the request is cancelled.
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

// chosen: the selected entry of the suggestion menu, which counts as typed.
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

// {text, id} of a completion, or of its first line if the rest takes longer. Then the editor requests
// the whole completion again, from the helper's cache.
function firstLineOrAll(request, token) {
  const whole = askedAgain // this time
  askedAgain = false
  return new Promise((resolve) => {
    let written = ''
    let early = false
    let timer = null
    const onCancel = (cancel) => token.onCancellationRequested(cancel)
    const onText = (text, id) => {
      written += text
      const line = /^\s*\S.*(?=\n)/.exec(written)
      if (whole || timer || !line) return
      timer = setTimeout(() => {
        early = true
        resolve({ text: line[0], id })
      }, FIRST_LINE_MS)
    }
    helper.ask(request, onCancel, onText).then((reply) => {
      clearTimeout(timer)
      if (!early) resolve(reply || { text: '' })
      else if (reply && !token.isCancellationRequested) {
        askedAgain = true
        vscode.commands.executeCommand('editor.action.inlineSuggest.trigger')
      }
    })
  })
}

// The completion and other samples, each as in `firstLineOrAll`.
async function alternatives(request, token) {
  const found = []
  const onCancel = (cancel) => token.onCancellationRequested(cancel)
  for (let number = 0; number <= ALTERNATIVES.count && !token.isCancellationRequested; number++) {
    const sample = number ? { temperature: ALTERNATIVES.temperature } : {}
    const reply = await helper.ask({ ...request, ...sample, explicit: true }, onCancel)
    if (reply && !found.some(({ text }) => text === reply.text)) found.push(reply)
  }
  return found
}

const provider = {
  async provideInlineCompletionItems(document, position, context, token) {
    if (nextEdit || !isEnabled(document)) return []
    const chosen = context.selectedCompletionInfo
    const request = requestAt(document, position, chosen)
    const byHand = context.triggerKind === vscode.InlineCompletionTriggerKind.Invoke && !askedAgain
    // The next ghost after a whole one was generated ahead.
    const accepted = given && given.document === document && given.end === request.prefix
    if (!accepted && !byHand && !(await rests(settings().get('delay'), token))) return []
    const replies = byHand ? await alternatives(request, token) : [await firstLineOrAll(request, token)]
    const found = replies.filter(({ text }) => text.trim())
    if (!found.length || token.isCancellationRequested) return []
    given = { document, end: request.prefix + found[0].text }
    const range = chosen ? chosen.range : new vscode.Range(position, position)
    return found.map(({ text, id }) => {
      const command = { command: 'akunu.accepted', title: '', arguments: [id, [...text].length] }
      return new vscode.InlineCompletionItem((chosen ? chosen.text : '') + text, range, command)
    })
  },
}

// Requests a prefill for the cursor position once the cursor rests.
function cursorMoved(editor) {
  clearTimeout(resting)
  if (nextEdit || !editor || editor.document.uri.scheme === 'output') return
  if (!settings().get('readAhead')) return
  resting = setTimeout(() => {
    if (!isEnabled(editor.document) || editor.document.isClosed) return
    helper.readAhead(requestAt(editor.document, editor.selection.active))
  }, REST_MS)
}

// The reply to a request for the next edit, or null.
function askForEdit(document, position, edits, onCancel) {
  if (!isEnabled(document)) return Promise.resolve(null)
  const text = document.getText() // the whole text, because the reply has its line numbers
  const at = document.offsetAt(position)
  const [prefix, suffix] = [text.slice(0, at), text.slice(at)]
  return helper.ask({ ...requestAt(document, position), prefix, suffix, files: [], edits }, onCancel)
}

function watchEdits(context) {
  nextEdit = new NextEdit(askForEdit, (...which) => helper.accepted(...which))
  vscode.workspace.textDocuments.forEach((document) => nextEdit.opened(document))
  context.subscriptions.push(
    nextEdit,
    vscode.workspace.onDidOpenTextDocument((document) => nextEdit.opened(document)),
    vscode.workspace.onDidChangeTextDocument(({ document }) => nextEdit.changed(document)),
    vscode.commands.registerCommand('akunu.acceptNextEdit', () => nextEdit.accept()),
    vscode.commands.registerCommand('akunu.hideNextEdit', () => nextEdit.hide()),
  )
}

function shown(editor) {
  if (!editor || editor.document.uri.scheme === 'output') return
  used = [editor.document, ...used.filter((other) => other !== editor.document)].slice(0, 50)
}

function activate(context) {
  statusBar = vscode.window.createStatusBarItem(vscode.StatusBarAlignment.Right)
  showState('idle')
  statusBar.show()
  restart()
  if (settings().get('nextEdit')) watchEdits(context)
  vscode.window.visibleTextEditors.forEach(shown)
  shown(vscode.window.activeTextEditor)
  cursorMoved(vscode.window.activeTextEditor)
  context.subscriptions.push(
    statusBar,
    vscode.window.onDidChangeActiveTextEditor(shown),
    vscode.window.onDidChangeActiveTextEditor(cursorMoved),
    vscode.window.onDidChangeTextEditorSelection((change) => cursorMoved(change.textEditor)),
    vscode.commands.registerCommand('akunu.restart', restart),
    vscode.commands.registerCommand('akunu.accepted', (...which) => helper.accepted(...which)),
    vscode.workspace.onDidChangeConfiguration((change) => {
      if (change.affectsConfiguration('akunu.command')) restart()
    }),
    vscode.languages.registerInlineCompletionItemProvider({ pattern: '**' }, provider),
  )
}

function deactivate() {
  clearTimeout(resting)
  helper.dispose()
}

module.exports = { activate, deactivate }
