// Runs the VS Code extension outside VS Code: `node vscode_run.js EXTENSION COMMAND...`. Reads one
// JSON object a line, {"text", "line", "character", ...}, requests a completion there (with "rest"
// the cursor only rests there), accepts it with "accept", and prints the items, the warnings and the
// commands of the editor. With "changes", texts that are typed in order, it applies "times" next
// edits (with "undo" it undoes each and types that text), and prints each and the text after it.
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

class Selection {
  constructor(anchor, active) {
    Object.assign(this, { anchor, active })
  }
}

class ThemeColor {}

const nothing = { dispose() {} }
const tabOf = (fsPath) => ({ input: { uri: { scheme: 'file', fsPath } } })
const settings = {
  enabled: true, filetypes: { markdown: false }, readAhead: true, command, delay: 0, maxDelay: 0,
  timeMs: 200000,
  trigger: process.env.TRIGGER || 'auto', maxLines: 0, nextEdit: process.env.NEXT_EDIT === '1',
}
const statusBar = { show() {}, dispose() {} }
const again = [] // commands of the editor
const commands = {}
let cursorMoved = null
let rangesChanged = null
// The cursor rests at once; a helper has its time to end.
const later = setTimeout
global.setTimeout = (call, ms) => later(call, ms >= 500 && ms < 5000 ? 0 : ms)
let contextSet = () => {}
const onChange = []
const documentChanged = (document, contentChanges = [], reason = undefined) =>
  onChange.forEach((listener) => listener({ document, contentChanges, reason }))
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
  if (name === 'setContext') return contextSet(...given)
  again.push(name)
  if (name.endsWith('.trigger')) onTrigger()
}
const vscode = {
  Range,
  Position,
  Selection,
  ThemeColor,
  InlineCompletionItem,
  StatusBarAlignment: { Right: 2 },
  TextDocumentChangeReason: { Undo: 1, Redo: 2 },
  TextEditorRevealType: { InCenter: 2 },
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
    onDidChangeTextEditorVisibleRanges: (listener) => ((rangesChanged = listener), nothing),
    onDidChangeTextEditorSelection(listener) {
      cursorMoved = listener
      return nothing
    },
    createStatusBarItem: () => statusBar,
    createTextEditorDecorationType: (options) => ({ ...options, ...nothing }),
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

// An editor on a text that can be changed.
function editorOf(text) {
  const its = { version: 0, decorations: new Map() }
  const lines = () => text.split('\n')
  const change = (now, reason) => {
    text = now
    its.document.version++
    documentChanged(its.document, [], reason)
  }
  its.document = {
    ...documentOf(text),
    version: 0,
    getText: () => text,
    get lineCount() { return lines().length },
    offsetAt: ({ line, character }) => documentOf(text).offsetAt({ line, character }),
    lineAt: (line) => ({
      text: lines()[line],
      range: new Range(new Position(line, 0), new Position(line, lines()[line].length)),
    }),
  }
  its.setDecorations = (kind, ranges) => its.decorations.set(kind, ranges)
  const [visible] = [{ start: new Position(0, 0), end: new Position(9, 0) }]
  its.visibleRanges = [visible] // ten lines
  its.revealRange = ({ start: { line } }, type) => {
    if (type === undefined) return
    Object.assign(visible, { start: new Position(line - 5, 0), end: new Position(line + 5, 0) })
    setTimeout(() => rangesChanged({ textEditor: its }), 0)
  }
  its.edit = async (build) => {
    build({
      replace: ({ start, end }, now) => {
        const at = its.document.offsetAt(start)
        change(text.slice(0, at) + now + text.slice(its.document.offsetAt(end)))
      },
    })
    return true
  }
  return { its, change }
}

async function nextEdits(asked) {
  const { its, change } = editorOf(asked.text)
  its.selection = { active: new Position(asked.line, asked.character) }
  vscode.window.activeTextEditor = its
  documentChanged(its.document)
  let isShown = () => {}
  contextSet = (_, shown) => shown && isShown()
  const found = []
  for (const text of asked.changes) change(text)
  for (let time = 0; time < asked.times; time++) {
    await new Promise((resolve) => (isShown = resolve))
    const shown = [...its.decorations.values()].flat()
    const before = its.document.getText()
    const rows = shown.map(({ start, end, range, renderOptions }) =>
      range
        ? [range.start.line, renderOptions.after.contentText]
        : [start.line, its.document.lineAt(start.line).text.slice(start.character, end.character)])
    await commands['akunu.acceptNextEdit']()
    found.push({ rows, text: its.document.getText(), cursor: its.selection.active })
    if (!asked.undo || time === asked.times - 1) continue
    change(before, 1)
    later(() => change(asked.undo), 500) // typed later
  }
  console.log(JSON.stringify(found))
}

async function answer(asked) {
  const triggered = asked.whole && new Promise((resolve) => (onTrigger = resolve))
  if (asked.changes) return nextEdits(asked)
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
