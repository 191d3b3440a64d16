-- What the server cannot see: recently copied, saved and visited texts, and buffers that are not loaded.
local M = {}

local api = vim.api
local MAX_RECENT = 8
local MAX_FILES = 8
local NEAR = 10 -- lines around a saved or visited place

local recent = {} -- the last one first
local sent = {} -- the last context by client

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

-- The paths of listed buffers that are not loaded.
local function unloaded()
  local paths = {}
  for _, buffer in ipairs(vim.fn.getbufinfo({ buflisted = 1 })) do
    if buffer.loaded == 0 and buffer.name ~= '' and #paths < MAX_FILES then
      table.insert(paths, buffer.name)
    end
  end
  return paths
end

local function send(buf)
  local context = { recent = recent, files = unloaded() }
  for _, client in ipairs(vim.lsp.get_clients({ bufnr = buf, name = 'akunu' })) do
    if not vim.deep_equal(sent[client.id], context) then
      sent[client.id] = vim.deepcopy(context)
      client:notify('akunu/context', context)
    end
  end
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
