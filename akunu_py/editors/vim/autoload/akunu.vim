vim9script
# Ghost text at the cursor: requests it from `akunu complete` as JSON lines, draws it as virtual text
# and accepts it, whole or in part. All buffers share one job; in the helper, a newer request
# supersedes the older one ("channel").

import autoload 'akunu/context.vim'

const PROP = 'AkunuGhost'
const MAX_LINES = 2000  # on either side of the cursor
const REST_MS = 500 # without cursor movement in normal mode, before a prefill
const ALTERNATIVES = 2
const FILETYPES = {gitcommit: false, gitrebase: false} # unless the user says otherwise

var job: job
var last_error = ''            # the last line that the helper wrote to stderr
var shown_messages: dict<bool> = {} # messages already shown
var trouble = ''               # the reason for missing ghosts, '' for none
var failures = 0 # of the helper, since its last answer
var start_at = 0 # earliest restart, in seconds
var loading_popup = 0 # shown while the model loads
var loading = false
var last_id = 0
var asked: dict<any> = {} # the current request: {id, spot, text}, with the text so far
var spot: dict<any> = {}  # the last known cursor position
var ghost = ''
var ghost_id = 0 # id of its answer
var choices: dict<any> = {} # alternatives of the shown ghost: {spot, texts, at}
var timer = -1
var rest_timer = -1
var read_ticks: dict<number> = {} # changedtick of buffers whose text was prefilled
var rest_to_show = ''          # rest of a ghost while a part of it is typed
var accepted_to: dict<any> = {} # cursor position after the part was typed
var typed_options: dict<any> = {} # their values before the typing
var typed_options_of = 0       # the buffer

# ---- where

def Here(): dict<any>
  const line = getline('.')
  const at = col('.') - 1
  return {
    bufnr: bufnr(), lnum: line('.'), tick: b:changedtick,
    before: strpart(line, 0, at), after: strpart(line, at),
  }
enddef

def IsEnabled(): bool
  const of_type = FILETYPES->extendnew(get(g:, 'akunu_filetypes', {}))
    ->get(&filetype, get(g:, 'akunu_enabled', true))
  return get(b:, 'akunu_enabled', of_type) && &buftype ==# '' && &modifiable && !&binary
enddef

def IsWanted(): bool
  return IsEnabled() && mode() ==# 'i' && !pumvisible() && reg_executing() ==# ''
enddef

# Returns the rest of `text` from `then` after the cursor moved to `now`, '' if other text than
# its start was typed.
def Rest(text: string, then: dict<any>, now: dict<any>): string
  if then.bufnr != now.bufnr || then.lnum != now.lnum || then.after !=# now.after
      || stridx(now.before, then.before) != 0
    return ''
  endif
  const typed = strpart(now.before, strlen(then.before))
  return stridx(text, typed) == 0 ? strpart(text, strlen(typed)) : ''
enddef

# ---- events

# Insert mode starts. Timers, because mode() is outdated.
export def Enter()
  timer_start(0, (_) => ReadAhead())
  AskSoon()
enddef

# Whether ghosts are shown only after a key.
def IsByKey(): bool
  return get(g:, 'akunu_trigger', 'auto') ==# 'key'
enddef

def AskSoon()
  timer_stop(timer)
  if IsByKey()
    return
  endif
  timer = timer_start(get(g:, 'akunu_delay', 100), (_) => Ask())
enddef

# The text or the cursor changed in insert mode.
export def Update()
  RestoreOptions()  # after an interrupted typing
  if !IsWanted()
    Dismiss()
    return
  endif
  const now = Here()
  if now == spot
    return
  endif
  const rest = ghost ==# '' ? '' : Rest(ghost, spot, now)
  spot = now
  if rest !=# ''
    Show(rest)
    return
  endif
  Hide()
  Cancel()
  AskSoon()
enddef

# Insert mode ended, or the user left the buffer.
export def Leave()
  RestoreOptions()
  Dismiss()
  spot = {}
  accepted_to = {}
enddef

export def Dismiss()
  timer_stop(timer)
  Hide()
  Cancel()
enddef

def Cancel()
  if !asked->empty()
    Send({cancel: asked.id})
    asked = {}
  endif
enddef

export def Sweep()
  if !prop_type_get(PROP)->empty()
    prop_remove({type: PROP, all: true})
  endif
enddef

# The cursor moved in normal mode. Once it rests, its position is prefilled if the buffer has
# changed since the last time.
export def Rests()
  timer_stop(rest_timer)
  if IsEnabled()
    rest_timer = timer_start(get(g:, 'akunu_rest', REST_MS), (_) => Rested())
  endif
enddef

def Rested()
  if mode() !=# 'n' || !IsEnabled()
    return
  endif
  context.Visited()
  if !read_ticks->has_key($'{bufnr()}')
    read_ticks[$'{bufnr()}'] = b:changedtick
    if get(g:, 'akunu_read_ahead', true)
      Start()  # the model loads before the first request
    endif
  elseif read_ticks[$'{bufnr()}'] != b:changedtick
    ReadAhead()
  endif
enddef

# For TextYankPost, BufWritePost.
export def Yanked()
  if IsEnabled() && v:event.regname !=# '_'
    context.Yanked()
  endif
enddef

export def Saved()
  if IsEnabled()
    context.Saved()
  endif
enddef

# ---- requests

# more: fields of the request that override the defaults.
export def Ask(more: dict<any> = {})
  if !IsWanted() || !Start()
    return
  endif
  spot = Here()
  last_id += 1
  asked = {id: last_id, spot: spot, text: ''}
  Send(Request(spot)->extend({stream: true})->extend(more))
enddef

# Shows another ghost: the next alternative, or the first ones as soon as they are there.
export def Another()
  Update()  # letters typed just before the key
  if choices->empty() || choices.spot != Here()
    Ask({alternatives: ALTERNATIVES})
  else
    choices.at = (choices.at + 1) % len(choices.texts)
    ShowChoice()
  endif
enddef

def ShowChoice()
  const count = len(choices.texts)
  Show(choices.texts[choices.at], count > 1 ? $' ({choices.at + 1} of {count})' : '')
enddef

def ReadAhead()
  if mode() =~# '[ni]' && get(g:, 'akunu_read_ahead', true) && IsEnabled() && Start()
    last_id += 1
    read_ticks[$'{bufnr()}'] = b:changedtick
    Send(Request(Here())->extend({max_tokens: 0}))
  endif
enddef

def Request(at: dict<any>): dict<any>
  const [prefix, suffix] = Around(at)
  const path = expand('%:p')
  var request = {
    id: last_id, channel: 'vim', prefix: prefix, suffix: suffix, path: path,
    language: &filetype, files: context.OtherFiles(), recent: context.Recent(),
    root: context.Root(path), time_ms: get(g:, 'akunu_time_ms', 3000),
  }
  for name in ['max_tokens', 'max_lines', 'temperature']
    if has_key(g:, $'akunu_{name}')
      request[name] = g:[$'akunu_{name}']
    endif
  endfor
  return request
enddef

# The text before and after the cursor. The cuts move in steps, so that the helper's caches stay
# valid from line to line.
def Around(at: dict<any>): list<string>
  const step = MAX_LINES / 2
  const first = at.lnum <= MAX_LINES ? 1 : (at.lnum - step) / step * step
  const final = (at.lnum + MAX_LINES) / step * step
  var before = getline(first, at.lnum - 1)->add(at.before)
  var after = [at.after] + getline(at.lnum + 1, final)
  return [before->join("\n"), after->join("\n")]
enddef

# Starts the helper if needed; returns whether it runs.
def Start(): bool
  if job_status(job) ==# 'run'
    return true
  elseif localtime() < start_at
    return false
  endif
  const command = get(g:, 'akunu_command', ['akunu', 'complete'])
  if !executable(command[0])
    Notify($'{command[0]}: no such program; install akunu or set g:akunu_command')
    return false
  endif
  last_error = ''
  job = job_start(command, {
    mode: 'nl', noblock: 1, stoponexit: 'term',
    out_cb: (_, line) => Answered(line),
    err_cb: (_, line) => {
      last_error = line
    },
    exit_cb: (ended, code) => Ended(ended, code),
  })
  return job_status(job) ==# 'run'
enddef

def Send(message: dict<any>)
  if job_status(job) ==# 'run'
    ch_sendraw(job, json_encode(message) .. "\n")
  endif
enddef

def Ended(ended: job, code: number)
  # Vim may notice the end before it reads the last lines.
  var line = 'unread'
  while line !=# '' && ch_status(ended, {part: 'err'}) ==# 'open'
    line = ch_read(ended, {part: 'err', timeout: 0})
    last_error = line ==# '' ? last_error : line
  endwhile
  asked = {}
  Loaded()
  if code != 0
    start_at = localtime() + min([60, float2nr(pow(2, failures))])
    failures += 1
    const why = last_error->substitute('^akunu: ', '', '')
    Notify($'the helper ended with {code}: {why}  (it is tried again)')
  endif
enddef

def Answered(line: string)
  var reply: dict<any>
  try
    reply = json_decode(line)
  catch
    Notify($'not an answer: {strpart(line, 0, 60)}')
    return
  endtry
  if reply->has_key('hello')
    return
  elseif reply->has_key('status')
    Loading()
    return
  endif
  Loaded()
  # The reply to an invalid line has no id.
  const is_ours = !asked->empty() && (reply.id == v:null || reply.id == asked.id)
  if reply->has_key('error')
    asked = is_ours ? {} : asked
    Notify(reply.error)
    return
  endif
  failures = 0
  if trouble !=# ''
    trouble = ''
    shown_messages = {}
  endif
  if is_ours
    const then = asked.spot
    const text = reply->get('text', asked.text .. reply->get('delta', ''))
    asked.text = text
    if reply->has_key('text')
      asked = {}
    endif
    if IsWanted()
      spot = Here()
      ghost_id = reply.id == v:null ? 0 : reply.id
      const rest = Rest(text, then, spot)
      if reply->has_key('alternatives') && spot == then && rest !=# ''
        choices = {spot: spot, texts: [text] + reply.alternatives, at: empty(reply.alternatives) ? 0 : 1}
        ShowChoice()
      else
        Show(rest)
      endif
    endif
  endif
enddef

# Shows that the model is loading.
def Loading()
  loading = true
  if popup_getpos(loading_popup)->empty()
    loading_popup = popup_notification('akunu: the model is being loaded', {time: 60000})
  endif
enddef

def Loaded()
  loading = false
  popup_close(loading_popup)
enddef

# Shows each message once, because the next keystroke may repeat it. Cut, because a long message
# needs Enter. The status has it, too.
def Notify(message: string)
  trouble = message
  redrawstatus
  if !shown_messages->has_key(message)
    shown_messages[message] = true
    echohl WarningMsg
    echomsg strcharpart($'akunu: {message}', 0, &columns - 15)
    echohl None
  endif
enddef

# ---- the ghost

# hint: shown after the text.
def Show(text: string, hint = '')
  Hide()
  if text =~# '^\_s*$'
    return
  endif
  ghost = text
  if prop_type_get(PROP)->empty()
    prop_type_add(PROP, {highlight: PROP})
  endif
  const lines = $'{text}{hint}'->split("\n", true)
    ->map((_, line) => substitute(line, "\t", repeat(' ', &tabstop), 'g'))
  const lnum = spot.lnum
  if lines[0] !=# ''
    prop_add(lnum, strlen(spot.before) + 1, {type: PROP, text: lines[0]})
  endif
  for line in lines[1 :]
    prop_add(lnum, 0, {type: PROP, text: line ==# '' ? ' ' : line, text_align: 'below'})
  endfor
  Redraw()
enddef

# Early Vim 9 scrolls wrongly when virtual lines change (seen in 9.0.1378). Setting this option, to
# any value, redraws the windows of the buffer without flicker.
def Redraw()
  noautocmd &l:tabstop = &l:tabstop
enddef

def Hide()
  if ghost !=# ''
    ghost = ''
    Sweep()
    Redraw()
  endif
enddef

export def IsShown(): bool
  return ghost !=# '' && Rest(ghost, spot, Here()) !=# ''
enddef

# Inserts the ghost at the cursor: all of it, or its next 'word' or 'line'. The rest stays a ghost.
export def Accept(part: string)
  # Vim looks up a key before it inserts the letters typed just before.
  Update()
  if ghost ==# ''
    const otherwise = '<Plug>(akunu-else-accept' .. (part ==# '' ? '' : $'-{part}') .. ')'
    if maparg(otherwise, 'i') !=# ''
      feedkeys(otherwise->substitute('<Plug>', "\<Plug>", ''), 'im')
    endif
    return
  endif
  const pattern = {
    word: '^\_s*\%(\k\+\|\%(\k\@!\S\)\+\)',
    line: '^\n\=[^\n]*',
  }->get(part, '^\_.*')
  const text = matchstr(ghost, pattern)
  rest_to_show = strpart(ghost, strlen(text))
  Send({accepted: ghost_id})
  Hide()
  # CTRL-] expands an abbreviation that the user typed just before the ghost.
  # CTRL-G u lets undo remove the ghost and keep what was typed.
  const before = IsAccepted() ? '' : text =~# '^\k' ? "\<C-G>u" : "\<C-]>\<C-G>u"
  feedkeys(before .. "\<Cmd>call akunu#TypeLiterally()\<CR>"
    .. Keys(text) .. "\<Cmd>call akunu#Accepted()\<CR>", 'ni')
enddef

# Whether nothing was typed since a ghost was accepted.
def IsAccepted(): bool
  const now = Here()
  return !accepted_to->empty() && now.bufnr == accepted_to.bufnr
    && now.lnum == accepted_to.lnum && now.before ==# accepted_to.before
enddef

# The keys that type `text`, so that undo, repeat and counts work. 0 CTRL-D removes the indentation
# that Vim adds to a repeated line break.
def Keys(text: string): string
  const lines = text->split("\n", true)
    ->map((_, line) => line->substitute('[[:cntrl:]]', "\<C-V>&", 'g'))
  return lines->join("\<CR>0\<C-D>")
enddef

# Turns off options that change typed text until `Accepted`.
export def TypeLiterally()
  if typed_options->empty()
    const plain = {
      autoindent: false, smartindent: false, cindent: false, lisp: false, indentexpr: '',
      formatoptions: '', textwidth: 0, wrapmargin: 0,
    }
    for [name, value] in plain->items()
      typed_options[name] = getbufvar('', $'&{name}')
      noautocmd setbufvar('', $'&{name}', value)
    endfor
    typed_options_of = bufnr()
  endif
enddef

def RestoreOptions()
  for [name, value] in typed_options->items()
    noautocmd setbufvar(typed_options_of, $'&{name}', value)
  endfor
  typed_options = {}
enddef

# The keys of `Accept` were typed.
export def Accepted()
  RestoreOptions()
  spot = Here()
  accepted_to = spot
  if rest_to_show !=# ''
    Show(rest_to_show)
  elseif !IsByKey()
    Ask()  # the next ghost was generated ahead
  endif
enddef

# ---- keys and commands

const KEYS = {
  accept: '<Tab>', 'accept-word': '<C-F>', 'accept-line': '<C-L>', dismiss: '<C-]>', another: '', ask: '',
}
const ASK_KEY = '<C-Space> <C-@>' # two names, by terminal

export def MapKeys()
  const defaults = IsByKey() ? KEYS->extendnew({ask: ASK_KEY}) : KEYS
  for [action, keys] in defaults->extendnew(get(g:, 'akunu_keys', {}))->items()
    for key in split(keys, ' ')
      Map(key, action)
    endfor
  endfor
enddef

# Without a ghost, a key keeps its earlier function. With a ghost, the key of "ask" shows another one.
def Map(key: string, action: string)
  if action ==# 'ask'
    execute $'imap <expr> {key} akunu#IsShown() ? "\<Plug>(akunu-another)" : "\<Plug>(akunu-ask)"'
    return
  endif
  const otherwise = $'<Plug>(akunu-else-{action})'
  var before = maparg(key, 'i', false, true)
  if before->empty()
    # The form feed of CTRL-L would be useless.
    execute $'inoremap {otherwise} {key ==? '<C-L>' ? '<Nop>' : key}'
  else
    before->filter((field, _) => field !=# 'lhsrawalt')
    mapset('i', false, before->extend({lhs: otherwise, lhsraw: $"\<Plug>(akunu-else-{action})", buffer: 0}))
  endif
  const there = $'"\<Plug>(akunu-{action})"'
  const not_there = $'"\<Plug>(akunu-else-{action})"'
  execute $'imap <expr> {key} akunu#IsShown() ? {there} : {not_there}'
enddef

export def Subcommands(lead: string, _: string, __: number): list<string>
  return ['disable', 'enable', 'restart', 'status']->filter((_, name) => stridx(name, lead) == 0)
enddef

export def Command(name: string)
  if name ==# 'enable' || name ==# 'disable'
    g:akunu_enabled = name ==# 'enable'
  elseif name ==# 'restart'
    job_stop(job)
    trouble = ''
    failures = 0
    start_at = 0
    shown_messages = {}
    asked = {}
  elseif name ==# 'status' || name ==# ''
    echo $'akunu: {Status()}'
  else
    echohl ErrorMsg
    echomsg $'akunu: no such subcommand: {name}; there are {Subcommands('', '', 0)->join(', ')}'
    echohl None
  endif
enddef

# For a status line: off, idle (not started), loading, asking, shown or ready; or "failed: " and the reason.
export def Status(): string
  if !IsEnabled()
    return 'off'
  elseif trouble !=# ''
    return $'failed: {trouble}'
  elseif loading
    return 'loading'
  elseif job_status(job) !=# 'run'
    return 'idle'
  endif
  return !asked->empty() ? 'asking' : ghost !=# '' ? 'shown' : 'ready'
enddef
