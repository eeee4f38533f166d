-- Hold on for a while from now; a missing lease is taken again, unless another holds it or a newer attempt was started.
-- Never shortens: a beat that was sent before the lease was extended may arrive after that.
-- KEYS[1]: the lease. ARGV: attempt, owner, lease in ms, mark in seconds.
local held = redis.call('GET', KEYS[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local hold_until = now + ARGV[3]
if held then
  local attempt, held_until, owner = string.match(held, '^(%d+) (%d+) (.*)$')
  if owner == ARGV[2] then
    hold_until = math.max(hold_until, tonumber(held_until))
  elseif tonumber(held_until) > now or tonumber(attempt) > tonumber(ARGV[1]) then
    return 0
  end
end
redis.call('SET', KEYS[1], string.format('%s %.0f %s', ARGV[1], hold_until, ARGV[2]), 'EX', ARGV[4])
return 1
