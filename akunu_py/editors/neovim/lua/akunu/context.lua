-- What the server cannot see: recently copied, saved and visited texts, buffers that are not loaded, and
-- the files that define names at the cursor, as other servers know them.
local M = {}

local api = vim.api
local MAX_RECENT = 8
local MAX_FILES = 8
local NEAR = 10 -- lines around a saved or visited place
local PAUSE_MS = 300 -- without cursor movement, before other servers are asked
local MAX_NAMES = 6 -- that they are asked for at once
local MAX_DEFINITION_FILES = 4
local METHOD = 'textDocument/definition'

local recent = {} -- the last one first
local sent = {} -- the last context by client
local definitions = {} -- paths of files by name, '' for none, by buffer; forgotten when it is saved

local function add(lines)
  local text = vim.fn.strcharpart(table.concat(lines, '\n'), 0, 4000)
  if not text:find('%S') then return end
  recent = vim.tbl_filter(function(other) return other ~= text end, recent)
  table.insert(recent, 1, text)
  recent[MAX_RECENT + 1] = nil
end

local function add_around(row)
  add(api.nvim_buf_get_lines(0, math.max(0, row - 1 - NEAR), row + NEAR, false))
end

-- Calls `visit` with the names from the cursor upwards, and their places, until it returns true.
local function each_name(visit)
  local row = api.nvim_win_get_cursor(0)[1]
  local lines = api.nvim_buf_get_lines(0, math.max(0, row - NEAR), row, false)
  for at = #lines, 1, -1 do
    for col, name in lines[at]:gmatch('()([%a_][%w_]+)') do
      if visit(name, row - #lines + at - 1, col - 1, lines[at]) then return end
    end
  end
end

-- The paths of other files: those that define names at the cursor, then buffers that are not loaded.
local function other_files(buf)
  local paths, known = {}, definitions[buf] or {}
  each_name(function(name)
    local path = known[name] or ''
    if path ~= '' and not vim.list_contains(paths, path) then table.insert(paths, path) end
    return #paths == MAX_DEFINITION_FILES
  end)
  for _, buffer in ipairs(vim.fn.getbufinfo({ buflisted = 1 })) do
    if buffer.loaded == 0 and buffer.name ~= '' and #paths < MAX_FILES then
      table.insert(paths, buffer.name)
    end
  end
  return paths
end

local function send(buf)
  if buf ~= api.nvim_get_current_buf() then return end
  local context = { recent = recent, files = other_files(buf) }
  for _, client in ipairs(vim.lsp.get_clients({ bufnr = buf, name = 'akunu' })) do
    if not vim.deep_equal(sent[client.id], context) then
      sent[client.id] = vim.deepcopy(context)
      client:notify('akunu/context', context)
    end
  end
end

-- Asks the other servers of a buffer where names at the cursor are defined, each once.
local function find_definitions(buf)
  if buf ~= api.nvim_get_current_buf() then return end
  local clients = vim.tbl_filter(function(client)
    return client.name ~= 'akunu'
  end, vim.lsp.get_clients({ bufnr = buf, method = METHOD }))
  local known, count = definitions[buf] or {}, 0
  definitions[buf] = known
  each_name(function(name, row, col, line)
    if #clients == 0 or known[name] then return #clients == 0 end
    known[name], count = '', count + 1
    for _, client in ipairs(clients) do
      local character = vim.str_utfindex(line, client.offset_encoding, col, false)
      client:request(METHOD, {
        textDocument = vim.lsp.util.make_text_document_params(buf),
        position = { line = row, character = character },
      }, function(_, result)
        local found = result and (result[1] or result) -- a Location, or a list of them or of LocationLinks
        local uri = found and (found.uri or found.targetUri) or ''
        local path = vim.startswith(uri, 'file:') and vim.uri_to_fname(uri) or ''
        if path ~= '' and path ~= api.nvim_buf_get_name(buf) then
          known[name] = path
          send(buf)
        end
      end, buf)
    end
    return count == MAX_NAMES
  end)
end

function M.enable()
  local group = api.nvim_create_augroup('akunu.context', {})
  local visited = nil -- {buf, row}
  local function on(events, callback)
    api.nvim_create_autocmd(events, {
      group = group,
      callback = function(event)
        local is_ours = #vim.lsp.get_clients({ bufnr = event.buf, name = 'akunu' }) > 0
        if is_ours then callback(event) end
      end,
    })
  end
  on('TextYankPost', function() add(vim.v.event.regcontents) end)
  local timer = vim.uv.new_timer()
  on({ 'CursorMoved', 'CursorMovedI', 'InsertEnter', 'LspAttach' }, function(event)
    timer:start(PAUSE_MS, 0, vim.schedule_wrap(function() find_definitions(event.buf) end))
  end)
  on({ 'BufWritePost', 'BufUnload' }, function(event) definitions[event.buf] = nil end)
  on('BufWritePost', function() add_around(api.nvim_buf_get_mark(0, '.')[1]) end)
  on('CursorHold', function(event)
    local row = api.nvim_win_get_cursor(0)[1]
    local near = visited and visited[1] == event.buf and math.abs(visited[2] - row) <= NEAR
    if near then return end
    if visited then add_around(row) end
    visited = { event.buf, row }
  end)
  on('InsertEnter', function(event) send(event.buf) end)
end

return M
