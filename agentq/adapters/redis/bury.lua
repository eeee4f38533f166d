-- The process is dead: what it held is held by nobody, but was started.
-- KEYS[1]: the lease. ARGV: what the owner begins with.
local held = redis.call('GET', KEYS[1])
if held then
  local attempt, started, owner = string.match(held, '^(%d+) %d+ (%d+) (.*)$')
  if string.sub(owner, 1, #ARGV[1]) == ARGV[1] then
    redis.call('SET', KEYS[1], attempt .. ' 0 ' .. started .. ' ' .. owner, 'KEEPTTL')
    return 1
  end
end
return 0
