// Runs the VS Code extension outside VS Code: `node vscode_run.js EXTENSION COMMAND...`. Reads one
// JSON object a line, {"text", "line", "character", ...}, requests a completion there (with "rest"
// the cursor only rests there), accepts it with "accept", and prints the items, the warnings and the
// commands of the editor.
// The fake `vscode` module has what the extension uses.
'use strict'

const Module = require('node:module')
const readline = require('node:readline')

const [extension, ...command] = process.argv.slice(2)
const warnings = []
let provider = null

class Range {
  constructor(start, end) {
    Object.assign(this, { start, end })
  }
}

class InlineCompletionItem {
  constructor(insertText, range, command) {
    Object.assign(this, { insertText, range, command })
  }
}

class Position {
  constructor(line, character) {
    Object.assign(this, { line, character })
  }
}

const nothing = { dispose() {} }
const tabOf = (fsPath) => ({ input: { uri: { scheme: 'file', fsPath } } })
const settings = {
  enabled: true, filetypes: { markdown: false }, readAhead: true, command, delay: 0,
  timeMs: 200000,
  trigger: process.env.TRIGGER || 'auto', maxLines: 0,
}
const statusBar = { show() {}, dispose() {} }
const again = [] // commands of the editor
const commands = {}
let cursorMoved = null
// The cursor rests at once; a helper has its time to end.
const later = setTimeout
global.setTimeout = (call, ms) => later(call, ms >= 500 && ms < 5000 ? 0 : ms)
const onChange = []
const documentChanged = (document, contentChanges) =>
  onChange.forEach((listener) => listener({ document, contentChanges }))
let onTrigger = () => {}
// The name `area` is defined in the file that DEFINES names; the language server fails at `broken`.
function definitionAt(uri, { line, character }) {
  const { fsPath } = { fsPath: process.env.DEFINES }
  const text = [...documents.values()].find((each) => each.uri === uri).getText().split('\n')[line]
  if (text.slice(character).startsWith('broken')) throw new Error('the language server failed')
  if (!fsPath || !text.slice(character).startsWith('area')) return []
  const start = { line: 0, character: 0 }
  return [{ targetUri: { scheme: 'file', fsPath }, targetRange: { start } }]
}
async function executed(name, ...given) {
  if (name === 'vscode.executeDefinitionProvider') return definitionAt(...given)
  again.push(name)
  if (name.endsWith('.trigger')) onTrigger()
}
const vscode = {
  Range,
  Position,
  InlineCompletionItem,
  StatusBarAlignment: { Right: 2 },
  InlineCompletionTriggerKind: { Invoke: 0, Automatic: 1 },
  commands: { registerCommand: (name, run) => ((commands[name] = run), nothing), executeCommand: executed },
  languages: {
    registerInlineCompletionItemProvider(_, given) {
      provider = given
      return nothing
    },
  },
  window: {
    activeTextEditor: undefined,
    tabGroups: { all: [{ tabs: (process.env.TABS || '').split(':').filter(Boolean).map(tabOf) }] },
    visibleTextEditors: [],
    onDidChangeActiveTextEditor: () => nothing,
    onDidChangeTextEditorSelection(listener) {
      cursorMoved = listener
      return nothing
    },
    createStatusBarItem: () => statusBar,
    showWarningMessage: (message) => warnings.push(message),
  },
  workspace: {
    getConfiguration: () => ({ get: (name) => settings[name] }),
    onDidChangeConfiguration: () => nothing,
    textDocuments: [],
    onDidOpenTextDocument: () => nothing,
    onDidChangeTextDocument: (listener) => (onChange.push(listener), nothing),
    onDidSaveTextDocument: () => nothing,
    getWorkspaceFolder: () => ({ uri: { fsPath: '/tmp' } }),
  },
}

const load = Module._load
Module._load = (name, ...rest) => (name === 'vscode' ? vscode : load(name, ...rest))
const { activate, deactivate } = require(extension)

const documents = new Map()
function documentOf(text, languageId = 'python') {
  const key = `${languageId} ${text}`
  if (!documents.has(key)) documents.set(key, makeDocument(text, languageId))
  return documents.get(key)
}

function makeDocument(text, languageId) {
  const starts = [0]
  for (let at = text.indexOf('\n'); at >= 0; at = text.indexOf('\n', at + 1)) starts.push(at + 1)
  return {
    getText: () => text,
    offsetAt: (position) => starts[position.line] + position.character,
    positionAt: (offset) => {
      const line = starts.filter((start) => start <= offset).length - 1
      return new Position(line, offset - starts[line])
    },
    fileName: '/tmp/a.py',
    languageId,
    isClosed: false,
    uri: { scheme: 'file' },
  }
}

async function answer(asked) {
  const triggered = asked.whole && new Promise((resolve) => (onTrigger = resolve))
  const document = documentOf(asked.text, asked.language)
  const position = { line: asked.line, character: asked.character }
  if (asked.edited) documentChanged(document, [{ text: '', rangeLength: 1, rangeOffset: 0 }])
  if (asked.rest) return cursorMoved({ textEditor: { document, selection: { active: position } } })
  const listeners = []
  const token = {
    isCancellationRequested: false,
    onCancellationRequested: (listener) => listeners.push(listener),
  }
  if (asked.cancel) {
    setTimeout(() => {
      token.isCancellationRequested = true
      listeners.forEach((listener) => listener())
    }, asked.cancel)
  }
  const items = await provider.provideInlineCompletionItems(
    document,
    position,
    { selectedCompletionInfo: asked.chosen, triggerKind: asked.byHand ? 0 : 1 },
    token,
  )
  if (asked.accept) commands[items[0].command.command](...items[0].command.arguments)
  const status = statusBar.tooltip
  console.log(JSON.stringify({ items, warnings: warnings.splice(0), status, again }))
  if (!triggered) return
  await triggered
  await answer({ ...asked, whole: false, byHand: true })
}

const context = { subscriptions: [] }
activate(context)
const lines = readline.createInterface({ input: process.stdin })
const answers = []
lines.on('line', (line) => {
  const asked = JSON.parse(line) // with "after", when all before are answered
  const before = asked.after ? Promise.all(answers) : Promise.resolve()
  answers.push(before.then(() => answer(asked)))
})
lines.on('close', () => Promise.all(answers).then(() => {
  deactivate()
  context.subscriptions.forEach((each) => each.dispose())
}))
