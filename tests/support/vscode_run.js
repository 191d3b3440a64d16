// Runs the VS Code extension outside VS Code: `node vscode_run.js EXTENSION COMMAND...`. Reads one
// JSON object a line, {"text", "line", "character", "cancel"?}, asks for a completion there, and
// prints what the editor would be given. VS Code itself is as much of it as the extension uses.
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
  constructor(insertText, range) {
    Object.assign(this, { insertText, range })
  }
}

const nothing = { dispose() {} }
const settings = { enabled: true, command, delay: 0, timeMs: 200000, maxLines: 0 }
const vscode = {
  Range,
  InlineCompletionItem,
  commands: { registerCommand: () => nothing },
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

function documentOf(text) {
  const starts = [0]
  for (let at = text.indexOf('\n'); at >= 0; at = text.indexOf('\n', at + 1)) starts.push(at + 1)
  return {
    getText: () => text,
    offsetAt: (position) => starts[position.line] + position.character,
    fileName: '/tmp/a.py',
    languageId: 'python',
    isClosed: false,
  }
}

async function answer(asked) {
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
    documentOf(asked.text),
    { line: asked.line, character: asked.character },
    { selectedCompletionInfo: asked.chosen },
    token,
  )
  console.log(JSON.stringify({ items, warnings: warnings.splice(0) }))
}

activate({ subscriptions: [] })
const lines = readline.createInterface({ input: process.stdin })
const answers = []
lines.on('line', (line) => answers.push(answer(JSON.parse(line))))
lines.on('close', () => Promise.all(answers).then(deactivate))
