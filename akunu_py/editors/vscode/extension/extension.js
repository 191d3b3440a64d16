// Inline completion in VS Code from `akunu complete`.
'use strict'

const vscode = require('vscode')
const { Helper, windowStart } = require('./helper.js')
const { Context } = require('./context.js')

const MAX_CHARACTERS = 200000 // on either side of the cursor
const FIRST_LINE_MS = 50 // before a first line is shown without the rest
const ALTERNATIVES = 2 // for an explicit request
const REST_MS = 500 // without cursor movement, before a prefill

let helper = null
let statusBar = null
let resting = null
let asked = null // the place of the last request: {document, offset}
let whole = null // the completion whose first line is shown: {document, prefix, suffix, reply}
// The last ghost: {document, end, id, rest, offset, taken, typed}; end: the text up to its end.
let given = null
const edited = new WeakSet() // documents that changed since the last prefill
const related = new Context()

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
    files: related.otherFiles(document),
    recent: related.recent,
    root: related.root(document),
    time_ms: settings().get('timeMs'),
  }
  const lines = settings().get('maxLines')
  if (lines > 0) request.max_lines = lines
  return request
}

// {text, id} of a completion, or of its first line if the rest takes longer. Then the editor requests
// the completion again, and gets all of it. It keeps a shown item, so that is hidden first.
function firstLineOrAll(document, request, token) {
  return new Promise((resolve) => {
    let written = ''
    let early = false
    let timer = null
    const onCancel = (cancel) => token.onCancellationRequested(cancel)
    const onText = (text, id) => {
      written += text
      const line = /^\s*\S.*(?=\r?\n)/.exec(written)
      if (timer || !line) return
      timer = setTimeout(() => {
        early = true
        resolve({ text: line[0], id })
      }, FIRST_LINE_MS)
    }
    helper.ask(request, onCancel, onText).then((reply) => {
      clearTimeout(timer)
      if (!early) resolve(reply || { text: '' })
      else if (reply && !token.isCancellationRequested) {
        whole = { document, prefix: request.prefix, suffix: request.suffix, reply }
        vscode.commands.executeCommand('editor.action.inlineSuggest.hide')
        vscode.commands.executeCommand('editor.action.inlineSuggest.trigger')
      }
    })
  })
}

// The completion of `request` whose first line is shown, or null.
function wholeOf(document, request) {
  const found = whole
  whole = null
  const same = found && found.document === document && found.prefix === request.prefix
  return same && found.suffix === request.suffix ? found.reply : null
}

// The completion and other samples, each as in `firstLineOrAll`.
async function alternatives(request, token) {
  const onCancel = (cancel) => token.onCancellationRequested(cancel)
  const reply = await helper.ask({ ...request, alternatives: ALTERNATIVES }, onCancel)
  if (!reply) return []
  return [reply.text, ...(reply.alternatives || [])].map((text) => ({ text, id: reply.id }))
}

const provider = {
  async provideInlineCompletionItems(document, position, context, token) {
    const chosen = context.selectedCompletionInfo
    const byHand = context.triggerKind === vscode.InlineCompletionTriggerKind.Invoke
    const byKey = settings().get('trigger') === 'key'
    if (!isEnabled(document) || (byKey && (chosen || !byHand))) return []
    const request = requestAt(document, position, chosen)
    const rest = wholeOf(document, request)
    const offset = document.offsetAt(position)
    // By key, alternatives only when it is pressed again.
    const again = !byKey || (asked && asked.document === document && asked.offset === offset)
    // The next ghost after a whole one may have been generated ahead.
    const accepted = given && given.document === document && given.end === request.prefix
    if (!rest && !accepted && !byHand && !(await rests(settings().get('delay'), token))) return []
    if (!rest) asked = { document, offset }
    const replies = rest
      ? [rest]
      : byHand && again
        ? await alternatives(request, token)
        : [await firstLineOrAll(document, request, token)]
    const found = replies.filter(({ text }) => text.trim())
    if (!found.length || token.isCancellationRequested) return []
    given = { document, end: request.prefix + found[0].text }
    const range = chosen ? chosen.range : new vscode.Range(position, position)
    return found.map(({ text, id }) => {
      const command = { command: 'akunu.accepted', title: '', arguments: [id] }
      return new vscode.InlineCompletionItem((chosen ? chosen.text : '') + text, range, command)
    })
  },
}

// Requests a prefill for the cursor position once the cursor rests, if the document has changed since
// the last time. The model loads as soon as it rests in any document.
function cursorMoved(editor) {
  clearTimeout(resting)
  if (!editor || editor.document.uri.scheme === 'output') return
  const { document } = editor
  resting = setTimeout(() => {
    if (!isEnabled(document) || document.isClosed) return
    const position = editor.selection.active
    related.findDefinitions(document, position)
    related.moved(document, position)
    related.visited(document, position.line)
    if (!settings().get('readAhead')) return
    const known = asked && asked.document === document && asked.offset === document.offsetAt(position)
    if (!edited.has(document)) helper.start()
    else if (!known) {
      edited.delete(document)
      helper.readAhead(requestAt(document, position))
    }
  }, REST_MS)
}

function changed({ document, contentChanges }) {
  if (document.uri.scheme === 'output' || !contentChanges.length) return
  edited.add(document)
}

function shown(editor) {
  if (editor && editor.document.uri.scheme !== 'output') related.shown(editor.document)
}

function saved(document) {
  const at = related.offsets.get(String(document.uri))
  related.definitions.delete(String(document.uri))
  if (isEnabled(document) && at !== undefined) related.remember(document, document.positionAt(at).line)
}

function activate(context) {
  statusBar = vscode.window.createStatusBarItem(vscode.StatusBarAlignment.Right)
  showState('idle')
  statusBar.show()
  restart()
  vscode.window.visibleTextEditors.forEach(shown)
  shown(vscode.window.activeTextEditor)
  cursorMoved(vscode.window.activeTextEditor)
  context.subscriptions.push(
    statusBar,
    vscode.window.onDidChangeActiveTextEditor(shown),
    vscode.window.onDidChangeActiveTextEditor(cursorMoved),
    vscode.window.onDidChangeTextEditorSelection((change) => cursorMoved(change.textEditor)),
    vscode.commands.registerCommand('akunu.restart', restart),
    vscode.commands.registerCommand('akunu.accepted', (id) => helper.accepted(id)),
    vscode.workspace.onDidChangeTextDocument(changed),
    vscode.workspace.onDidSaveTextDocument(saved),
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
