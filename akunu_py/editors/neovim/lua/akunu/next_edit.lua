-- Shows the next edit that the model predicts, at the changed lines, and applies it.
local M = {}

local api = vim.api
local namespace = api.nvim_create_namespace('akunu.next_edit')
local PAUSE = 200 -- milliseconds without a change before a request

local shown = nil -- {buf, tick, client, first, last, lines, command}
local timer = assert(vim.uv.new_timer())
local cancel = nil -- cancels the current request

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

-- Marks the removed text and shows the new text below.
local function show(edit)
  shown = edit
  vim.keymap.set('n', '<Esc>', M.hide, { buffer = edit.buf, desc = 'Hide the next edit' })
  for row = edit.first, edit.last - 1 do
    api.nvim_buf_set_extmark(edit.buf, namespace, row, 0, { line_hl_group = 'DiffDelete' })
  end
  if #edit.lines == 0 then return end
  api.nvim_buf_set_extmark(edit.buf, namespace, math.max(edit.last - 1, 0), 0, {
    virt_lines = vim.tbl_map(function(line) return { { line, 'DiffAdd' } } end, edit.lines),
    virt_lines_above = edit.last == 0,
  })
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
    if failed or not here or not edit or edit == vim.NIL then return end
    show(vim.tbl_extend('error', edit, { buf = buf, tick = tick, client = client }))
  end, buf)
  cancel = sent and function() client:cancel_request(id) end or nil
end

-- Applies the shown edit as one undo step, and moves the cursor to its end.
function M.accept()
  if not M.visible() then return end
  local edit = shown
  M.hide()
  vim.cmd('let &g:undolevels = &g:undolevels') -- starts a new undo step
  api.nvim_buf_set_lines(edit.buf, edit.first, edit.last, false, edit.lines)
  local row = math.max(1, edit.first + #edit.lines)
  local line = api.nvim_buf_get_lines(edit.buf, row - 1, row, false)[1] or ''
  api.nvim_win_set_cursor(0, { math.min(row, api.nvim_buf_line_count(edit.buf)), #line })
  edit.client:exec_cmd(edit.command)
end

-- key: applies the edit; without one, it keeps its function.
function M.enable(key)
  if key ~= '' then
    vim.keymap.set({ 'n', 'i' }, key, function()
      return M.visible() and "<Cmd>lua require('akunu.next_edit').accept()<CR>" or key
    end, { expr = true, desc = 'Make the next edit' })
  end
  local group = api.nvim_create_augroup('akunu.next_edit', {})
  api.nvim_create_autocmd({ 'TextChanged', 'TextChangedI' }, {
    group = group,
    callback = function()
      M.hide()
      timer:start(PAUSE, 0, vim.schedule_wrap(ask))
    end,
  })
  api.nvim_create_autocmd({ 'BufLeave' }, { group = group, callback = M.hide })
end

return M
