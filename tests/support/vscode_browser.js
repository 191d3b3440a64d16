// Drives VS Code (code-server) in Chromium: `node vscode_browser.js TOOLS DIRECTORY PORT`. DIRECTORY has
// `user`, `extensions` and `workspace`. Reads JSON lines: {"open": path}, {"keys": [...]}, {"type": text}
// or {}. After each it prints {"text"}: the lines of the editor as they are shown, ghosts included.
'use strict'

const { spawn } = require('node:child_process')
const path = require('node:path')
const readline = require('node:readline')

const [tools, directory, port] = process.argv.slice(2)
const { chromium } = require(path.join(tools, 'node_modules', 'playwright-core'))
const address = `127.0.0.1:${port}`

function startServer() {
  const options = [
    '--auth', 'none', '--bind-addr', address, '--user-data-dir', `${directory}/user`,
    '--extensions-dir', `${directory}/extensions`, '--config', `${directory}/config.yaml`,
    '--disable-telemetry', '--disable-update-check',
  ]
  const entry = path.join(tools, 'node_modules/code-server/out/node/entry.js')
  const server = spawn(process.execPath, [entry, ...options], { stdio: ['ignore', 'pipe', 'ignore'] })
  return new Promise((resolve) => {
    server.stdout.on('data', (data) => /listening/.test(data) && resolve(server))
  })
}

async function open(page, file) {
  const folder = `${directory}/workspace`
  const payload = JSON.stringify([['openFile', `vscode-remote://${address}${file}`]])
  await page.goto(`http://${address}/?folder=${folder}&payload=${encodeURIComponent(payload)}`)
  await page.waitForSelector('.editor-instance .view-line')
  await page.waitForSelector('.statusbar-item[aria-label*="akunu"]')
  await page.click('.editor-instance .view-lines')
}

// By position, because the order of the elements is another; ghosts have lines in zones of their own.
const shown = (page) => page.evaluate(() => {
  const lines = [...document.querySelectorAll(
    '.editor-instance .view-line, .editor-instance .view-zones .suggest-preview-text .view-line')]
  const unique = [...new Set(lines)].map((line) => [line.getBoundingClientRect().top, line.innerText])
  return unique.sort((a, b) => a[0] - b[0]).map(([, text]) => text.replaceAll('\u00a0', ' ')).join('\n')
})

async function main() {
  const server = await startServer()
  const browser = await chromium.launch({
    executablePath: '/usr/bin/chromium', args: ['--no-sandbox', '--disable-gpu'],
  })
  const page = await browser.newPage()
  page.setDefaultTimeout(150000)
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const asked = JSON.parse(line)
    if (asked.open) await open(page, asked.open)
    for (const key of asked.keys || []) await page.keyboard.press(key)
    if (asked.type) await page.keyboard.type(asked.type)
    if (asked.picture) await page.screenshot({ path: asked.picture })
    console.log(JSON.stringify({ text: await shown(page) }))
  }
  await browser.close()
  server.kill()
}

main().catch((error) => {
  console.error(error)
  process.exit(1)
})
