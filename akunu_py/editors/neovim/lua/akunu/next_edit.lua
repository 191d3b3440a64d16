-- Shows the next edit that the model predicts, next to the changed lines, and applies it.
local M = {}

local api = vim.api
local keymap = require('akunu.keymap')
local namespace = api.nvim_create_namespace('akunu.next_edit')
local PAUSE = 200 -- milliseconds without a change before a request

local shown = nil -- {buf, tick, client, first, last, lines, command}
local timer = assert(vim.uv.new_timer())
local cancel = nil -- cancels the current request
local made = nil -- the last applied edit: {buf, key, undo}; undo: the number of its change
local undone = {} -- keys of edits that the user undid

-- Whether a shown edit still fits the buffer.
function M.visible()
  return shown ~= nil and shown.buf == api.nvim_get_current_buf()
    and shown.tick == api.nvim_buf_get_changedtick(shown.buf)
end

function M.hide()
  timer:stop()
  if cancel then cancel() end
  if shown and api.nvim_buf_is_valid(shown.buf) then
    api.nvim_buf_clear_namespace(shown.buf, namespace, 0, -1)
    pcall(vim.keymap.del, 'n', '<Esc>', { buffer = shown.buf })
  end
  shown, cancel = nil, nil
end

local function key_of(edit)
  return table.concat({ edit.first, edit.last, unpack(edit.lines) }, '\n')
end

-- Returns the changed words of two lines as byte ranges: from, end in the old one, end in the new one.
local function changed_words(old, new)
  local in_word = '[%w_\128-\255]'
  local from, shorter = 0, math.min(#old, #new)
  while from < shorter and old:byte(from + 1) == new:byte(from + 1) do from = from + 1 end
  while from > 0 and old:sub(from, from):match(in_word) do from = from - 1 end
  local same = 0 -- bytes at the end
  while same < shorter - from and old:byte(#old - same) == new:byte(#new - same) do same = same + 1 end
  while same > 0 and old:sub(#old - same + 1, #old - same + 1):match(in_word) do same = same - 1 end
  return from, #old - same, #new - same
end

-- Whether the lines of the edit are visible.
local function is_visible(edit)
  return edit.first + 1 >= vim.fn.line('w0') and math.max(edit.first + 1, edit.last) <= vim.fn.line('w$')
end

local function mark(edit, row, col, options)
  api.nvim_buf_set_extmark(edit.buf, namespace, row, col, options)
end

-- Shows the new line next to the old one, or below it if there is no room. Returns the number of lines
-- that were shown: 0 or 1.
local function show_line(edit, row)
  local old = api.nvim_buf_get_lines(edit.buf, row, row + 1, false)[1]
  local new = edit.lines[row - edit.first + 1]
  if not new then
    mark(edit, row, 0, { end_row = row, end_col = #old, line_hl_group = 'DiffDelete' })
    return 0
  end
  local from, old_end, new_end = changed_words(old, new)
  if old_end > from then mark(edit, row, from, { end_row = row, end_col = old_end, hl_group = 'DiffDelete' }) end
  local text = {
    { new:sub(1, from), 'ComplHint' }, { new:sub(from + 1, new_end), 'DiffAdd' }, { new:sub(new_end + 1), 'ComplHint' },
  }
  local room = api.nvim_win_get_width(0) - vim.fn.strdisplaywidth(old) - 10
  if vim.fn.strdisplaywidth(new) <= room then
    table.insert(text, 1, { ' → ', 'ComplHint' })
    mark(edit, row, #old, { virt_text = text, virt_text_pos = 'eol' })
  else
    mark(edit, row, 0, { virt_lines = { text } })
  end
  return 1
end

-- Marks the removed words and shows the new lines. An edit outside the window is only announced.
local function show(edit)
  shown = edit
  vim.keymap.set('n', '<Esc>', M.hide, { buffer = edit.buf, desc = 'Hide the next edit' })
  if not is_visible(edit) then
    local row = api.nvim_win_get_cursor(0)[1] - 1
    local arrow = edit.first > row and '↓' or '↑'
    local text = (' %s next edit in line %d'):format(arrow, edit.first + 1)
    mark(edit, row, 0, { virt_text = { { text, 'ComplHint' } }, virt_text_pos = 'eol' })
    return
  end
  local count = 0
  for row = edit.first, edit.last - 1 do count = count + show_line(edit, row) end
  local more = vim.list_slice(edit.lines, count + 1)
  if #more > 0 then
    mark(edit, math.max(edit.last - 1, 0), 0, {
      virt_lines = vim.tbl_map(function(line) return { { line, 'DiffAdd' } } end, more),
      virt_lines_above = edit.last == 0,
    })
  end
end

local function ask()
  local buf = api.nvim_get_current_buf()
  local tick = api.nvim_buf_get_changedtick(buf)
  local client = vim.lsp.get_clients({ bufnr = buf, name = 'akunu' })[1]
  if not client then return end
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  local sent, id = client:request('akunu/nextEdit', params, function(failed, edit)
    cancel = nil
    local here = buf == api.nvim_get_current_buf() and tick == api.nvim_buf_get_changedtick(buf)
    if failed or not here or not edit or edit == vim.NIL or undone[key_of(edit)] then return end
    show(vim.tbl_extend('error', edit, { buf = buf, tick = tick, client = client }))
  end, buf)
  cancel = sent and function() client:cancel_request(id) end or nil
end

-- Moves the cursor to the shown edit if it is outside the window. Otherwise applies it as one undo
-- step, and moves the cursor to its end.
function M.accept()
  if not M.visible() then return end
  local edit = shown
  M.hide()
  if not is_visible(edit) then
    vim.cmd("normal! m'")
    api.nvim_win_set_cursor(0, { math.min(edit.first + 1, api.nvim_buf_line_count(edit.buf)), 0 })
    vim.cmd('normal! zz')
    vim.cmd.redraw() -- updates the first and last line of the window
    show(edit)
    return
  end
  vim.cmd('let &g:undolevels = &g:undolevels') -- starts a new undo step
  api.nvim_buf_set_lines(edit.buf, edit.first, edit.last, false, edit.lines)
  local row = math.max(1, edit.first + #edit.lines)
  local line = api.nvim_buf_get_lines(edit.buf, row - 1, row, false)[1] or ''
  api.nvim_win_set_cursor(0, { math.min(row, api.nvim_buf_line_count(edit.buf)), #line })
  made = { buf = edit.buf, key = key_of(edit), undo = vim.fn.changenr() }
  edit.client:exec_cmd(edit.command)
end

-- Remembers an applied edit that the user undid.
local function notice_undo()
  if made and made.buf == api.nvim_get_current_buf() then
    if vim.fn.changenr() < made.undo then undone[made.key] = true end
  end
end

local function map(key)
  for _, mode in ipairs({ 'n', 'i' }) do
    local otherwise = keymap.keep(mode, key, 'next-edit')
    vim.keymap.set(mode, key, function()
      return M.visible() and "<Cmd>lua require('akunu.next_edit').accept()<CR>" or otherwise
    end, { expr = true, remap = true, desc = 'Make the next edit' })
  end
end

-- key: applies the edit; without one, it keeps its function.
function M.enable(key)
  if key ~= '' then
    keymap.after_startup(function() map(key) end)
  end
  local group = api.nvim_create_augroup('akunu.next_edit', {})
  api.nvim_create_autocmd({ 'TextChanged', 'TextChangedI' }, {
    group = group,
    callback = function()
      M.hide()
      notice_undo()
      timer:start(PAUSE, 0, vim.schedule_wrap(ask))
    end,
  })
  api.nvim_create_autocmd({ 'BufLeave' }, { group = group, callback = M.hide })
end

return M
