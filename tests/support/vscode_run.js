// Runs the VS Code extension outside VS Code: `node vscode_run.js EXTENSION COMMAND...`. Reads one
// JSON object a line, {"text", "line", "character", "cancel"?, "language"?, "rest"?, "accept"?}, asks for
// a completion there (with "rest" the cursor only rests there), accepts it if asked to, and prints what the editor would be given, what it was told, and whether it was made to ask
// again. VS Code itself is as much of it as the extension uses.
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

const nothing = { dispose() {} }
const settings = {
  enabled: true, filetypes: { markdown: false }, readAhead: true, command, delay: 0, timeMs: 200000,
  maxLines: 0,
}
const statusBar = { show() {}, dispose() {} }
let again = 0
const commands = {}
let cursorMoved = null
// The cursor rests at once.
const later = setTimeout
global.setTimeout = (call, ms) => later(call, ms >= 500 ? 0 : ms)
const vscode = {
  Range,
  InlineCompletionItem,
  StatusBarAlignment: { Right: 2 },
  commands: { registerCommand: (name, run) => ((commands[name] = run), nothing), executeCommand: () => again++ },
  languages: {
    registerInlineCompletionItemProvider(_, given) {
      provider = given
      return nothing
    },
  },
  window: {
    activeTextEditor: undefined,
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
  },
}

const load = Module._load
Module._load = (name, ...rest) => (name === 'vscode' ? vscode : load(name, ...rest))
const { activate, deactivate } = require(extension)

function documentOf(text, languageId = 'python') {
  const starts = [0]
  for (let at = text.indexOf('\n'); at >= 0; at = text.indexOf('\n', at + 1)) starts.push(at + 1)
  return {
    getText: () => text,
    offsetAt: (position) => starts[position.line] + position.character,
    fileName: '/tmp/a.py',
    languageId,
    isClosed: false,
    uri: { scheme: 'file' },
  }
}

async function answer(asked) {
  const document = documentOf(asked.text, asked.language)
  const position = { line: asked.line, character: asked.character }
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
    { selectedCompletionInfo: asked.chosen },
    token,
  )
  if (asked.accept) commands[items[0].command.command](...items[0].command.arguments)
  const status = statusBar.tooltip
  console.log(JSON.stringify({ items, warnings: warnings.splice(0), status, again }))
}

activate({ subscriptions: [] })
const lines = readline.createInterface({ input: process.stdin })
const answers = []
lines.on('line', (line) => {
  const asked = JSON.parse(line) // with "after", when all before are answered
  const before = asked.after ? Promise.all(answers) : Promise.resolve()
  answers.push(before.then(() => answer(asked)))
})
lines.on('close', () => Promise.all(answers).then(deactivate))
