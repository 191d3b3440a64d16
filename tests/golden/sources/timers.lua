-- Timers that fire (once or often).
local Timers = {}
Timers.__index = Timers

local unpack = table.unpack or unpack

--[[ A new set of timers:
  1) clock tells the time
  2) the rest is optional ]]
function Timers.new(clock, options)
  local self = setmetatable({}, Timers)
  self.clock = clock
  self.options = options or { limit = 16, name = "timers" }
  self.list = {}
  return self
end

function Timers:after(seconds, action, ...)
  if #self.list >= self.options.limit then
    return nil, "too many (" .. #self.list .. ")"
  end
  local timer = { at = self.clock() + seconds, action = action, args = { ... } }
  table.insert(self.list, timer)
  table.sort(self.list, function(a, b)
    return a.at < b.at
  end)
  return timer
end

function Timers:run()
  local now = self.clock()
  while self.list[1] and self.list[1].at <= now do
    local timer = table.remove(self.list, 1)
    local ok, message = pcall(timer.action, unpack(timer.args))
    if not ok then
      print("failed: " .. message)
    elseif timer.every then
      self:after(timer.every, timer.action)
    else
      timer.done = true
    end
  end
end

local function describe(timers)
  local names = {}
  for index, timer in ipairs(timers.list) do
    names[index] = string.format("%d) %s", index, tostring(timer.at))
  end
  return table.concat(names, ", ")
end

return { new = Timers.new, describe = describe }
