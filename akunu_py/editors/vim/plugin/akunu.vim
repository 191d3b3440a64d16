" Ghost text from a local model. Help: :help akunu
if exists('g:loaded_akunu')
  finish
endif
let g:loaded_akunu = 1
if !has('vim9script') || !has('patch-9.0.0185') || !has('job') || !has('textprop')
  echomsg 'akunu: needs Vim 9.0.0185 or later, with +job and +textprop'
  finish
endif

highlight default link AkunuGhost NonText

command! -nargs=? -complete=customlist,akunu#Subcommands Akunu call akunu#Command(<q-args>)

inoremap <Plug>(akunu-accept) <Cmd>call akunu#Accept('')<CR>
inoremap <Plug>(akunu-accept-word) <Cmd>call akunu#Accept('word')<CR>
inoremap <Plug>(akunu-accept-line) <Cmd>call akunu#Accept('line')<CR>
inoremap <Plug>(akunu-dismiss) <Cmd>call akunu#Dismiss()<CR>
inoremap <Plug>(akunu-ask) <Cmd>call akunu#Ask()<CR>
inoremap <Plug>(akunu-another) <Cmd>call akunu#Another()<CR>

augroup akunu
  autocmd!
  " After the vimrc and the other plugins, so that their keys are known.
  autocmd VimEnter * call akunu#MapKeys()
  autocmd BufEnter,CursorMoved,TextChanged * call akunu#Rests()
  autocmd TextYankPost * call akunu#Yanked()
  autocmd BufWritePost * call akunu#Saved()
  autocmd InsertEnter * call akunu#Enter()
  autocmd TextChangedI,CursorMovedI * call akunu#Update()
  autocmd TextChangedP,CompleteChanged * call akunu#Dismiss()
  autocmd InsertLeave,BufLeave * call akunu#Leave()
  " Vim's undo brings back the virtual text of a line that it restores.
  autocmd TextChanged * call akunu#Sweep()
augroup END
if v:vim_did_enter
  call akunu#MapKeys()
endif
