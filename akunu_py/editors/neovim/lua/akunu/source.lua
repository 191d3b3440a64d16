-- A source for the menus of nvim-cmp and blink.cmp.
local source = {}

local METHOD = 'textDocument/inlineCompletion'

function source.new()
  return setmetatable({}, { __index = source })
end

local function helper()
  return vim.lsp.get_clients({ bufnr = 0, name = 'akunu' })[1]
end

-- Calls `callback` with the entries for the cursor position. Returns a function that cancels.
local function request(callback)
  local client, buf = helper(), vim.api.nvim_get_current_buf()
  local row, col = unpack(vim.api.nvim_win_get_cursor(0))
  local word = vim.api.nvim_get_current_line():sub(1, col):match('[%w_\128-\255]*$')
  local from, to = { line = row - 1, character = col - #word }, { line = row - 1, character = col }
  local params = vim.lsp.util.make_position_params(0, client.offset_encoding)
  params.context = { triggerKind = 2 }
  local _, id = client:request(METHOD, params, function(_, result)
    callback(vim.tbl_map(function(item)
      local text = word .. item.insertText
      return {
        label = vim.trim(text):match('[^\n]*'),
        filterText = word ~= '' and word or nil, -- the menus compare it with the typed word
        kind = vim.lsp.protocol.CompletionItemKind.Text,
        textEdit = { newText = text, range = { start = from, ['end'] = to } },
        documentation = { kind = 'markdown', value = ('```%s\n%s\n```'):format(vim.bo[buf].filetype, text) },
        command = item.command,
      }
    end, result and result.items or {}))
  end, buf)
  return function() client:cancel_request(id) end
end

-- ---- both plugins

function source:get_trigger_characters()
  return { '.', '(', '=', ' ' }
end

-- nvim-cmp passes the entry and a callback; blink.cmp passes a context before them, and a function
-- after them that inserts the entry.
function source:execute(...)
  local given = { ... }
  if given[4] then
    table.remove(given, 1)
    given[3]()
  end
  local client = helper()
  if client and given[1].command then client:exec_cmd(given[1].command) end
  given[2]()
end

-- ---- nvim-cmp

function source:is_available()
  return helper() ~= nil
end

function source:get_position_encoding_kind()
  return 'utf-8'
end

function source:complete(_, callback)
  request(function(items) callback({ items = items, isIncomplete = true }) end)
end

-- ---- blink.cmp

function source:enabled()
  return helper() ~= nil
end

function source:get_completions(_, callback)
  return request(function(items)
    callback({ items = items, is_incomplete_forward = true, is_incomplete_backward = true })
  end)
end

return source
