vim9script
# What a request contains beside its own buffer: other files, recent texts, the project's directory.

const MAX_LINES = 2000 # of another file, around its cursor
const MAX_FILES = 8
const MAX_BYTES = 100'000 # of another file
const MAX_FILE_BYTES = 10'000'000 # larger files are not read from disk
const STEP = 100 # lines; parts move in steps, so that the helper's caches stay valid
const MAX_RECENT = 8
const NEAR = 10 # lines around a saved or visited place
const MARKERS = ['.git', '.hg', '.jj', '.svn']

var parts: dict<dict<string>> = {} # by buffer number: version and text
var roots: dict<string> = {} # by directory
var recent: list<string> = [] # copied, saved or visited texts, the last one first
var visited: list<any> = [] # buffer and line of the last visited place

# The other listed buffers, the last used one first; unloaded ones as they are on disk.
export def OtherFiles(): list<dict<string>>
  var files: list<dict<string>> = []
  var others = getbufinfo({buflisted: 1})
    ->filter((_, buffer) => buffer.bufnr != bufnr() && getbufvar(buffer.bufnr, '&buftype') ==# '')
    ->sort((a, b) => b.lastused - a.lastused)
  for buffer in others
    const text = Part(buffer)
    if text !=# ''
      files->add({path: buffer.name, text: text})
    endif
    if len(files) == MAX_FILES
      break
    endif
  endfor
  return files
enddef

# The text around the cursor of a buffer.
def Part(buffer: dict<any>): string
  const center = buffer.lnum / STEP * STEP
  const first = max([1, center - MAX_LINES / 2])
  const changed = buffer.loaded ? $'{buffer.changedtick}' : $'{getftime(buffer.name)} on disk'
  const version = $'{changed} {center}'
  const key = $'{buffer.bufnr}'
  if get(parts, key, {})->get('version', '') !=# version
    var lines: list<string> = []
    if buffer.loaded
      lines = getbufline(buffer.bufnr, first, first + MAX_LINES - 1)
    elseif filereadable(buffer.name) && getfsize(buffer.name) <= MAX_FILE_BYTES
      lines = readfile(buffer.name, '', first + MAX_LINES - 1)[first - 1 :]
    endif
    parts[key] = {version: version, text: Fitting(lines, max([0, center - first]))}
  endif
  return parts[key].text
enddef

# Returns the `lines` around the line `at`, joined, of at most MAX_BYTES.
def Fitting(lines: list<string>, at: number): string
  var [kept, middle] = [lines, at]
  while len(kept) > 1 && strlen(kept->join("\n")) > MAX_BYTES
    const count = len(kept) / 2
    const from = max([0, min([middle - count / 2, len(kept) - count])])
    kept = kept[from : from + count - 1]
    middle -= from
  endwhile
  const text = kept->join("\n")
  return strlen(text) > MAX_BYTES ? '' : text
enddef

export def Recent(): list<string>
  return recent
enddef

def Add(text: string)
  if text =~# '\S'
    const cut = strcharpart(text, 0, 4000)
    recent = ([cut] + recent->filter((_, other) => other !=# cut))[: MAX_RECENT - 1]
  endif
enddef

def AddAround(lnum: number)
  Add(getline(max([1, lnum - NEAR]), lnum + NEAR)->join("\n"))
enddef

# For TextYankPost.
export def Yanked()
  Add(v:event.regcontents->join("\n"))
enddef

export def Saved()
  AddAround(line("'."))
enddef

# The cursor rests at a place.
export def Visited()
  const [buffer, lnum] = [bufnr(), line('.')]
  if visited->empty() || visited[0] != buffer || abs(visited[1] - lnum) > NEAR
    if !visited->empty()
      AddAround(lnum)
    endif
    visited = [buffer, lnum]
  endif
enddef

# The nearest directory under version control, otherwise the current one if it contains the file.
export def Root(path: string): string
  const start = path ==# '' ? getcwd() : fnamemodify(path, ':h')
  if !roots->has_key(start)
    var directory = start
    while MARKERS->copy()->filter((_, name) => getftype($'{directory}/{name}') !=# '')->empty()
      const parent = fnamemodify(directory, ':h')
      if parent ==# directory
        directory = ''
        break
      endif
      directory = parent
    endwhile
    roots[start] = directory
  endif
  const here = getcwd()
  const inside = here !=# '/' && here !=# expand('~') && stridx(path, here .. '/') == 0
  return roots[start] !=# '' ? roots[start] : inside ? here : ''
enddef
