-- Neovim's inline completion with `akunu complete --lsp`: keys that accept a ghost whole or in part, a
-- ghost that stays visible during the request for its rest, one that grows as text arrives, and
-- restarts of a helper that ended.
local M = {}

local api = vim.api
local namespace = api.nvim_create_namespace('akunu')
local native = api.nvim_create_namespace('nvim.lsp.inline_completion')
local METHOD = 'textDocument/inlineCompletion'
local PART = 'akunu/inlineCompletionPart' -- the partial answer so far
local LONGEST_PAUSE = 60 -- seconds before the restart of a helper that ended

local state, why = 'idle', '' -- of the helper: idle, loading, ready or failed
local failures = 0 -- of the helper, since the model last loaded
-- The rest of a partly accepted ghost, or the partial text of a new one: {buf, row, col, text,
-- item}.
local rest = nil
-- Whether Neovim's own item answers an earlier request; it is hidden until the next answer.
local outdated = false
-- What Neovim shows of its item: {buf, row, col, text}, nil if nothing.
local shown = nil
local accepted = nil -- cursor position after the last accepted ghost: {buf, tick, row, col}
local pending = nil -- the last request that Neovim sent and that is not answered: {client, id}
local choices = nil -- alternatives at a place: {place, items, at}
local asking = false -- this module sends a request, not Neovim

-- For a status line: idle, loading or ready; or "failed: " and the reason.
function M.status()
  return state == 'failed' and 'failed: ' .. why or state
end

-- ---- the ghost

local function cursor()
  local row, col = unpack(api.nvim_win_get_cursor(0))
  return row - 1, col
end

local function drop()
  if rest and api.nvim_buf_is_valid(rest.buf) then
    api.nvim_buf_clear_namespace(rest.buf, namespace, 0, -1)
  end
  rest = nil
end

-- Shows `text` at the cursor until the server answers, to avoid flicker. hint: shown after it.
local function keep(text, item, hint)
  drop()
  if text == '' then return end
  local row, col = cursor()
  rest = { buf = api.nvim_get_current_buf(), row = row, col = col, text = text, item = item }
  local lines = vim.tbl_map(function(line)
    return { { line, 'ComplHint' } }
  end, vim.split(text, '\n', { plain = true }))
  if hint then table.insert(lines[#lines], { hint, 'ComplHintMore' }) end
  api.nvim_buf_set_extmark(rest.buf, namespace, row, col, {
    virt_text = lines[1],
    virt_lines = #lines > 1 and vim.list_slice(lines, 2) or nil,
    virt_text_pos = 'inline',
    hl_mode = 'combine',
  })
end

-- Returns the rest of `text` from its position to the cursor, nil if other text than its start was
-- typed.
local function left(text, row, col)
  local now_row, now_col = cursor()
  local ok, typed = pcall(api.nvim_buf_get_text, 0, row, col, now_row, now_col, {})
  typed = ok and table.concat(typed, '\n') or nil
  return typed and vim.startswith(text, typed) and text:sub(#typed + 1) or nil
end

local function hide_outdated()
  if outdated then api.nvim_buf_clear_namespace(0, native, 0, -1) end
end

-- Remembers the text that Neovim shows, because its item is private.
local function remember()
  local mark = api.nvim_buf_get_extmarks(0, native, 0, -1, { details = true, limit = 1 })[1]
  shown = nil
  if not mark then return end
  local lines = { mark[4].virt_text and mark[4].virt_text[1][1] or '' }
  for _, line in ipairs(mark[4].virt_lines or {}) do
    table.insert(lines, line[1] and line[1][1] or '')
  end
  shown = { buf = api.nvim_get_current_buf(), row = mark[2], col = mark[3] }
  shown.text = table.concat(lines, '\n')
end

-- Whether what Neovim shows still continues the text at the cursor.
local function fits()
  if not shown or shown.buf ~= api.nvim_get_current_buf() then return false end
  local text = left(shown.text, shown.row, shown.col)
  return text ~= nil and text ~= ''
end

-- The cursor moved, or something was typed.
local function follow()
  if shown and not fits() then outdated, shown = true, nil end
  hide_outdated()
  if not rest then return end
  local here = rest.buf == api.nvim_get_current_buf()
  keep(here and left(rest.text, rest.row, rest.col) or '', rest.item)
end

-- Cancels the pending request after a key, unless the key continues its partial answer.
local function cancel()
  local client = pending and not rest and vim.lsp.get_client_by_id(pending.client)
  if client then
    client:cancel_request(pending.id)
    pending = nil
  end
end

-- The server sent a partial answer.
local function on_part(_, params, context)
  local client = vim.lsp.get_client_by_id(context.client_id)
  local position, buf = params.position, vim.uri_to_bufnr(params.textDocument.uri)
  local typing = buf == api.nvim_get_current_buf() and vim.startswith(api.nvim_get_mode().mode, 'i')
  local line = typing and api.nvim_buf_get_lines(buf, position.line, position.line + 1, false)[1]
  if not line or not client then return end
  local col = vim.str_byteindex(line, client.offset_encoding, position.character, false)
  local text = left(params.text, position.line, col)
  if text then
    outdated = true
    hide_outdated()
    keep(text, { client_id = client.id, command = params.command })
  end
end

-- ---- accepting

local function place()
  local row, col = cursor()
  return { api.nvim_get_current_buf(), api.nvim_buf_get_changedtick(0), row, col }
end

local function show_choice()
  local item, count = choices.items[choices.at], #choices.items
  outdated, shown = true, nil
  hide_outdated()
  keep(item.text, item, count > 1 and (' (%d of %d)'):format(choices.at, count) or nil)
end

-- Requests a ghost, or shows another one: the next alternative, or the first as soon as there is one.
function M.ask(another)
  local here = place()
  if another and choices and vim.deep_equal(choices.place, here) then
    choices.at = choices.at % #choices.items + 1
    return show_choice()
  end
  local client = vim.lsp.get_clients({ bufnr = 0, name = 'akunu' })[1]
  if not client or vim.fn.pumvisible() == 1 then return end
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  params.context = { triggerKind = another and 1 or 2 }
  pending, asking = nil, true
  client:request(METHOD, params, function(_, result)
    local items = vim.tbl_map(function(item)
      return { text = item.insertText, command = item.command, client_id = client.id }
    end, result and result.items or {})
    local typing = vim.startswith(api.nvim_get_mode().mode, 'i') and vim.deep_equal(here, place())
    if not typing or #items == 0 then return end
    choices = { place = here, items = items, at = math.min(#items, another and 2 or 1) }
    show_choice()
    if not another then choices = nil end
  end, here[1])
  asking = false
end

local insert -- runs after CTRL-]

-- Inserts the start of `text` that `pattern` matches, keeps the rest as a ghost, and notifies the
-- server. `text`: the rest of the item. CTRL-] expands an abbreviation typed just before. CTRL-G u
-- lets undo remove the ghost and keep what was typed.
local function take(text, item, pattern)
  local part = vim.fn.matchstr(text, pattern)
  local continues = vim.deep_equal(accepted, place()) -- a ghost accepted just before
  local ends_word = not continues and vim.fn.match(part, [[^\k]]) < 0
  insert = function()
    insert = nil
    api.nvim_paste(part, false, -1)
    accepted = place()
    keep(text:sub(#part + 1), item)
  end
  if continues then
    insert()
  else
    local keys = (ends_word and '<C-]>' or '') .. "<C-G>u<Cmd>lua require('akunu').insert()<CR>"
    api.nvim_feedkeys(vim.keycode(keys), 'ni', false)
  end
  local client = vim.lsp.get_client_by_id(item.client_id)
  if item.command and client then client:exec_cmd(item.command) end
end

local function on_accept(pattern, otherwise)
  return function(item)
    local text = item.insert_text
    if type(text) ~= 'string' or (item.range and not item.range:is_empty()) then
      if type(text) == 'string' then item.insert_text = vim.fn.matchstr(text, pattern) end
      return item
    end
    if item.range then
      local row, col = item.range:to_extmark()
      text = left(text, row, col) -- its first letters may have been typed since
    end
    if text then
      take(text, item, pattern)
    else -- another letter was typed just before the key
      api.nvim_feedkeys(vim.keycode(otherwise), 'im', false)
    end
    return nil
  end
end

-- For the keys of `take`.
function M.insert()
  if insert then insert() end
end

local PATTERNS = {
  accept = [[^\_.*]], -- all of it
  ['accept-word'] = [[^\_s*\k*\%(\k\@!\S\)*]],
  ['accept-line'] = [[^\n\=[^\n]*]],
}

-- For the keys of `map`.
function M.accept_rest(action)
  M.insert() -- the part accepted just before
  if rest then take(rest.text, rest.item, PATTERNS[action]) end
end

-- Maps the earlier function of `key` to the returned keys.
local function keep_mapping(key, action)
  local otherwise = ('<Plug>(akunu-else-%s)'):format(action)
  local before = vim.fn.maparg(key, 'i', false, true)
  if vim.tbl_isempty(before) then
    -- The form feed of CTRL-L would be useless.
    vim.keymap.set('i', otherwise, key:upper() == '<C-L>' and '<Nop>' or key)
  else
    before.lhs, before.lhsraw, before.lhsrawalt, before.buffer = otherwise, vim.keycode(otherwise), nil, 0
    vim.fn.mapset('i', false, before)
  end
  return otherwise
end

-- Maps `key` to accept a part of a ghost, of a partial one, or of the rest of one, before the next key
-- is processed. Without a ghost, `key` keeps its function.
local function map(key, action)
  local otherwise = keep_mapping(key, action)
  vim.keymap.set('i', key, function()
    if not PATTERNS[action] then
      local another = rest ~= nil or (not outdated and fits())
      if not another and action ~= 'ask' then return otherwise end
      return ("<Cmd>lua require('akunu').ask(%s)<CR>"):format(another)
    end
    local get = vim.lsp.inline_completion.get
    if not outdated and fits() and get({ on_accept = on_accept(PATTERNS[action], otherwise) }) then return '' end
    if rest then return ("<Cmd>lua require('akunu').accept_rest('%s')<CR>"):format(action) end
    return otherwise
  end, { expr = true, remap = true, desc = 'Accept an inline completion' })
end

local function map_keys(keys)
  for action, key in pairs(keys) do
    if key ~= '' then map(key, action) end
  end
end

-- ---- the helper

local function set_state(new)
  state = new
  vim.schedule(function() vim.cmd.redrawstatus({ bang = true }) end)
end

-- Makes the next message replace the last one, because two at once need Enter.
local function make_room()
  if api.nvim_get_mode().mode ~= 'r' then vim.cmd.redraw() end
end

-- Cuts the text, because a message longer than the screen needs Enter, too.
local function tell(status, text)
  make_room()
  text = vim.fn.strcharpart(text:gsub('%s+', ' '), 0, math.max(20, vim.o.columns - 25))
  api.nvim_echo({ { text } }, false, {
    kind = 'progress', id = 'akunu.helper', title = 'akunu', source = 'akunu', status = status,
  })
end

local function on_progress(event)
  local client = vim.lsp.get_client_by_id(event.data.client_id)
  local value = event.data.params.value
  if not client or client.name ~= 'akunu' then return end
  local known = state == 'failed' -- and reported
  if value.kind == 'begin' then
    set_state('loading')
    if not known then tell('running', 'the model is being loaded') end
  elseif value.kind == 'end' then
    set_state(value.message == 'failed' and 'failed' or 'ready')
    if state == 'ready' then failures = 0 end
    if state == 'ready' then tell('success', value.message)
    elseif not known then tell('failed', why) end
  end
end

local function on_request(event)
  local request = event.data.request
  if request.method ~= METHOD then return end
  if request.type == 'pending' then
    if asking then return end
    pending = { client = event.data.client_id, id = event.data.request_id }
  elseif request.type == 'complete' and pending and event.data.request_id == pending.id then
    pending, outdated, shown = nil, false, nil
    drop() -- Neovim shows the answer now
    vim.schedule(remember)
  end
end

-- Follows the cursor in a buffer, and requests a ghost if the server attached in insert mode.
local function on_attach(buf)
  if not api.nvim_buf_is_valid(buf) then return end
  local events = { 'CursorMovedI', 'TextChangedI' }
  api.nvim_clear_autocmds({ group = 'akunu', event = events, buffer = buf })
  api.nvim_create_autocmd(events, { group = 'akunu', buffer = buf, callback = function()
    follow()
    cancel()
  end })
  local typing = vim.startswith(api.nvim_get_mode().mode, 'i') and buf == api.nvim_get_current_buf()
  if typing and vim.lsp.inline_completion.is_enabled({ bufnr = buf }) then
    local group = ('nvim.lsp.inline_completion:%d'):format(buf)
    api.nvim_exec_autocmds('CursorMovedI', { group = group, buffer = buf })
  end
end

-- Restarts a helper that ended unexpectedly, after an increasing pause.
local function on_exit(code, signal)
  local asked_for = (code == 0 and signal == 0) or signal == 15 or vim.v.exiting ~= vim.NIL
  if asked_for then
    set_state('idle')
    return
  end
  local pause = math.min(LONGEST_PAUSE, 2 ^ failures)
  failures = failures + 1
  why = ('the helper ended with %d'):format(signal ~= 0 and signal or code)
  set_state('failed') -- Neovim shows its own message
  vim.schedule(function()
    vim.defer_fn(function()
      if vim.lsp.is_enabled('akunu') then vim.lsp.enable('akunu') end
    end, pause * 1000)
  end)
end

-- Whether the program exists; says once if it does not.
local function can_run(command)
  local program = type(command) == 'table' and command[1]
  if not program or vim.fn.executable(program) == 1 then return true end
  why = program .. ': no such program'
  if state ~= 'failed' then
    set_state('failed') -- vim.lsp.enable is silent about it
    vim.schedule(function() tell('failed', why .. '; install akunu or set cmd') end)
  end
  return false
end

-- Starts the server in a buffer without a file type, which vim.lsp.enable skips.
local function attach_untyped(buf)
  local bo = vim.bo[buf]
  local wanted = bo.buftype == '' and bo.modifiable and not bo.binary and vim.lsp.is_enabled('akunu')
  if not wanted or not can_run(vim.lsp.config.akunu.cmd) then return end
  if bo.filetype == '' and #vim.lsp.get_clients({ bufnr = buf, name = 'akunu' }) == 0 then
    vim.lsp.start(vim.tbl_extend('force', vim.lsp.config.akunu, { root_dir = vim.NIL }), { bufnr = buf })
  end
end

-- cmd: the command of the server. keys: keys by action, '' for none. filetypes: false for file types
-- without ghosts. trigger: 'key' shows ghosts only after the key of `ask`.
function M.setup(options)
  local filetypes = { gitcommit = false, gitrebase = false }
  filetypes = vim.tbl_extend('force', filetypes, options.filetypes or {})
  vim.lsp.config('akunu', {
    cmd = options.cmd,
    root_dir = function(buf, start)
      if filetypes[vim.bo[buf].filetype] ~= false and not vim.bo[buf].binary then start() end
    end,
    on_exit = on_exit,
    init_options = { inlineCompletionParts = true },
    handlers = {
      [PART] = on_part,
      ['window/showMessage'] = function(_, params)
        why = params.message:gsub('^akunu: ', '')
        set_state(state)
        tell('failed', why)
      end,
    },
  })
  vim.lsp.enable('akunu')
  local by_key = options.trigger == 'key'
  local keys = { accept = '<Tab>', ['accept-word'] = '<C-F>', ['accept-line'] = '<C-L>' }
  if by_key then keys.ask = '<C-Space>' end
  keys = vim.tbl_extend('force', keys, options.keys or {})
  if not by_key then vim.lsp.inline_completion.enable() end
  -- After the user's configuration, whose mappings are known then.
  if vim.v.vim_did_enter == 1 then map_keys(keys) end
  api.nvim_create_autocmd('VimEnter', { once = true, callback = function() map_keys(keys) end })
  require('akunu.context').enable()
  local group = api.nvim_create_augroup('akunu', {})
  local function on(events, callback)
    api.nvim_create_autocmd(events, { group = group, callback = callback })
  end
  on('LspAttach', function(event)
    -- Twice, because Neovim schedules its own autocommands, which show outdated items, once.
    vim.schedule(function() vim.schedule(function() on_attach(event.buf) end) end)
  end)
  -- Ghosts by key are hidden while a popup menu is open.
  on(by_key and { 'InsertLeave', 'BufLeave', 'CompleteChanged' } or { 'InsertLeave', 'BufLeave' }, function()
    outdated, shown = false, nil
    drop()
  end)
  on({ 'BufEnter', 'InsertEnter' }, function(event) attach_untyped(event.buf) end)
  on('LspProgress', on_progress)
  on('LspRequest', on_request)
end

return M
