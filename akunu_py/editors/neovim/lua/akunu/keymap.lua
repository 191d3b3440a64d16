-- Mappings that keep the earlier function of their keys.
local M = {}

-- Maps the earlier function of `key` in `mode` to the returned keys.
function M.keep(mode, key, action)
  local otherwise = ('<Plug>(akunu-else-%s)'):format(action)
  local before = vim.fn.maparg(key, mode, false, true)
  if vim.tbl_isempty(before) then
    -- The form feed of CTRL-L would be useless.
    local form_feed = mode == 'i' and key:upper() == '<C-L>'
    vim.keymap.set(mode, otherwise, form_feed and '<Nop>' or key)
  else
    before.lhs, before.lhsraw, before.lhsrawalt, before.buffer = otherwise, vim.keycode(otherwise), nil, 0
    vim.fn.mapset(mode, false, before)
  end
  return otherwise
end

-- Calls `run` after the user's configuration, whose mappings are known then.
function M.after_startup(run)
  if vim.v.vim_did_enter == 1 then return run() end
  vim.api.nvim_create_autocmd('VimEnter', { once = true, callback = function() run() end })
end

return M
