vim9script
# The delay before a request, from the user's typing speed and the time until an answer.

const PAUSE_MS = 1500.0 # a longer pause between two keys ends a rhythm
const LONGEST_MS = 1000
const NEWEST = 0.3 # weight of the last value in an average
const BATTERY = 2 # times the shortest delay

var last_key: list<any> = []
var asked_at: list<any> = [] # empty: no request waits for its first text
var interval = 0.0 # average milliseconds between two keys, 0 after a pause
var latency = 0.0 # average milliseconds until the first text
var on_battery = false

def MsSince(time: list<any>): float
  return reltimefloat(reltime(time)) * 1000
enddef

def Average(average: float, value: float): float
  return average == 0.0 ? value : average + NEWEST * (value - average)
enddef

export def Key()
  const gap = last_key->empty() ? PAUSE_MS : MsSince(last_key)
  interval = gap < PAUSE_MS ? Average(interval, gap) : 0.0
  last_key = reltime()
enddef

# A request is sent. If the one before has no text yet, its latency is at least its age.
export def Asked()
  const age = asked_at->empty() ? 0.0 : MsSince(asked_at)
  if age > latency && age < PAUSE_MS
    latency = Average(latency, age)
  endif
  asked_at = reltime()
enddef

# The first text of the last request arrived.
export def Answered()
  if !asked_at->empty()
    latency = Average(latency, MsSince(asked_at))
    asked_at = []
  endif
enddef

# The last request has no first text, or it says nothing about the usual latency.
export def Forget()
  asked_at = []
enddef

export def Battery(now: bool)
  on_battery = now
enddef

# Milliseconds without a key before a request. If the next key usually comes before the answer, only
# a pause longer than usual is worth a request.
export def Delay(): number
  const shortest = get(g:, 'akunu_delay', 100) * (on_battery ? BATTERY : 1)
  if interval == 0.0 || interval > shortest + latency
    return shortest
  endif
  return max([shortest, min([get(g:, 'akunu_max_delay', LONGEST_MS), float2nr(1.3 * interval)])])
enddef
