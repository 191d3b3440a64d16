// What a request contains besides its own document: other files, also those that define names at the
// cursor, recent texts, the project's directory.
'use strict'

const fs = require('node:fs')
const vscode = require('vscode')

const MAX_FILES = 8
const MAX_CHARACTERS = 100000 // of another file, around its cursor
const MAX_FILE_BYTES = 10000000 // larger files are not read from disk
const STEP = 10000 // characters; parts move in steps, so that the helper's caches stay valid
const MAX_RECENT = 8
const MAX_KNOWN = 50 // documents and cursors that are remembered
const NEAR = 10 // lines around a saved or visited place
const MAX_NAMES = 6 // for which language servers are asked at once
const MAX_DEFINITION_FILES = 4

// The part of `text` around `offset`, from the start of a line.
function part(text, offset) {
  if (text.length <= MAX_CHARACTERS) return text
  const latest = text.length - MAX_CHARACTERS
  const from = Math.min(latest, Math.max(0, Math.floor((offset - MAX_CHARACTERS / 2) / STEP) * STEP))
  const start = from ? text.indexOf('\n', from) + 1 : 0
  return text.slice(start, from + MAX_CHARACTERS)
}

// Keeps the MAX_KNOWN entries that were set last.
function setNewest(map, key, value) {
  map.delete(key)
  map.set(key, value)
  if (map.size > MAX_KNOWN) map.delete(map.keys().next().value)
}

class Context {
  constructor() {
    this.used = [] // documents, the last shown one first
    this.offsets = new Map() // of cursors, by URI
    this.read = new Map() // files from disk, by path: {time, text}
    this.recent = [] // saved or visited texts, the last one first
    this.visitedPlace = null // {uri, line}
    this.definitions = new Map() // by URI: {path, line} by name, null for none
  }

  // The names from the cursor upwards: [name, position].
  names(document, position) {
    const lines = document.getText().split('\n').slice(Math.max(0, position.line - NEAR), position.line + 1)
    return lines.reverse().flatMap((text, above) =>
      [...text.matchAll(/[A-Za-z_]\w+/g)].map((found) =>
        [found[0], new vscode.Position(position.line - above, found.index)]))
  }

  // Asks the language servers where names at the cursor are defined, each once until the file is saved.
  async findDefinitions(document, position) {
    const uri = String(document.uri)
    if (!this.definitions.has(uri)) setNewest(this.definitions, uri, new Map())
    const known = this.definitions.get(uri)
    const isNew = ([name], at, all) => !known.has(name) && all.findIndex((each) => each[0] === name) === at
    for (const [name, place] of this.names(document, position).filter(isNew).slice(0, MAX_NAMES)) {
      known.set(name, null)
      let found = []
      try {
        found = await vscode.commands.executeCommand('vscode.executeDefinitionProvider', document.uri, place)
      } catch {} // a failing language server is reported by its own extension
      const first = found && found[0] // a Location or a LocationLink
      const target = first && (first.uri || first.targetUri)
      if (!target || target.scheme !== 'file' || target.fsPath === document.fileName) continue
      known.set(name, { path: target.fsPath, line: (first.range || first.targetRange).start.line })
    }
  }

  // The files that define names at the cursor, the nearest first: {path, line}.
  definitionPlaces(document) {
    const known = this.definitions.get(String(document.uri))
    const at = this.offsets.get(String(document.uri))
    if (!known || at === undefined) return []
    const places = this.names(document, document.positionAt(at)).map(([name]) => known.get(name))
    return places.filter((each, index) => each && places.findIndex((other) => other && other.path === each.path) === index)
  }

  shown(document) {
    this.used = [document, ...this.used.filter((other) => other !== document)].slice(0, MAX_KNOWN)
  }

  moved(document, position) {
    setNewest(this.offsets, String(document.uri), document.offsetAt(position))
  }

  // The other open documents, the last used one first, then the files of other tabs from disk.
  otherFiles(document) {
    const files = []
    const known = new Set([document.fileName])
    const add = (path, uri, text) => {
      known.add(path)
      if (text) files.push({ path, text: part(text, this.offsets.get(String(uri)) || 0) })
    }
    for (const other of this.used) {
      if (files.length === MAX_FILES) return files
      if (!other.isClosed && !known.has(other.fileName)) add(other.fileName, other.uri, other.getText())
    }
    for (const { path, line } of this.definitionPlaces(document).slice(0, MAX_DEFINITION_FILES)) {
      if (files.length === MAX_FILES) return files
      const text = known.has(path) ? '' : this.onDisk(path)
      known.add(path)
      if (text) files.push({ path, text: part(text, text.split('\n', line).join('\n').length) })
    }
    for (const tab of vscode.window.tabGroups.all.flatMap((group) => group.tabs)) {
      if (files.length === MAX_FILES) return files
      const uri = tab.input && tab.input.uri
      if (uri && uri.scheme === 'file' && !known.has(uri.fsPath)) add(uri.fsPath, uri, this.onDisk(uri.fsPath))
    }
    return files
  }

  // The text of a file, '' if it cannot be read or is too large.
  onDisk(path) {
    try {
      const { mtimeMs, size } = fs.statSync(path)
      const known = this.read.get(path)
      if (known && known.time === mtimeMs) return known.text
      const text = size <= MAX_FILE_BYTES ? fs.readFileSync(path, 'utf8') : ''
      setNewest(this.read, path, { time: mtimeMs, text: text.includes('\0') ? '' : text })
      return this.read.get(path).text
    } catch {
      return ''
    }
  }

  remember(document, line) {
    const lines = document.getText().split('\n').slice(Math.max(0, line - NEAR), line + NEAR + 1)
    const text = lines.join('\n').slice(0, 4000)
    if (!text.trim()) return
    this.recent = [text, ...this.recent.filter((other) => other !== text)].slice(0, MAX_RECENT)
  }

  // The cursor rests in a line.
  visited(document, line) {
    const uri = String(document.uri)
    const last = this.visitedPlace
    if (last && last.uri === uri && Math.abs(last.line - line) <= NEAR) return
    if (last) this.remember(document, line)
    this.visitedPlace = { uri, line }
  }

  root(document) {
    const folder = vscode.workspace.getWorkspaceFolder(document.uri)
    return folder ? folder.uri.fsPath : ''
  }
}

module.exports = { Context }
