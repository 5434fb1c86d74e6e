"""The queue's atomic steps, as Lua scripts that Redis runs.

Keys, below a prefix (KEYS[1]; one Redis node, not a cluster: the scripts build key names):

    job:{id}          hash: digest, images, ref (of the payload), created (ms), state, rewards (JSON), left (parts),
                      "result:{reward}:{start}" per finished part, "tries:{reward}:{start}" deliveries
    stream:{reward}   one entry per part: job, start, stop (images start..stop-1)
    depth:{reward}    images in the stream, waiting or being scored
    dead:{reward}     parts that were given up, with the reason
    seen              sorted set of worker ids by their last sign of life (ms), info: hash worker id -> JSON
    served            sorted set of rewards by their last worker's sign of life (ms)
    max_batch         hash reward -> images of its largest part, 0: whole jobs
    totals            hash "{reward}:{what}": images scored and failed, parts delivered and given_up
    done (channel)    ids of jobs that were finished or cancelled

Times are Redis's own clock, so hosts need not agree.
"""

_NOW = """
local P = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""

_DROP = """
local function drop(reward, entry, images)
  redis.call('XACK', P .. 'stream:' .. reward, 'workers', entry)
  if redis.call('XDEL', P .. 'stream:' .. reward, entry) == 1 then
    redis.call('DECRBY', P .. 'depth:' .. reward, images)
  end
end
"""

# ARGV: id, digest, images, ref, job ttl ms, result ttl ms, max depth, grace ms, reward...
# -> {'new'} | {'same', ref} | {'conflict'} | {'unknown', reward} | {'full', reward, depth}; all rewards or none
SUBMIT = (
    _NOW
    + """
local job = P .. 'job:' .. ARGV[1]
local images, depth, grace = tonumber(ARGV[3]), tonumber(ARGV[7]), tonumber(ARGV[8])
local digest = redis.call('HGET', job, 'digest')
if digest == ARGV[2] then return {'same', redis.call('HGET', job, 'ref')} end
if digest then return {'conflict'} end
local rewards = {unpack(ARGV, 9)}
for _, reward in ipairs(rewards) do
  local seen = redis.call('ZSCORE', P .. 'served', reward)
  if not seen or now - seen > grace then return {'unknown', reward} end
end
for _, reward in ipairs(rewards) do
  local queued = tonumber(redis.call('GET', P .. 'depth:' .. reward) or 0)
  if queued + images > depth then return {'full', reward, queued} end
end
local left = 0
for _, reward in ipairs(rewards) do
  local step = tonumber(redis.call('HGET', P .. 'max_batch', reward) or 0)
  if step == 0 then step = images end
  for start = 0, images - 1, step do
    local stop = math.min(start + step, images)
    redis.call('XADD', P .. 'stream:' .. reward, '*', 'job', ARGV[1], 'start', start, 'stop', stop)
    left = left + 1
  end
  redis.call('INCRBY', P .. 'depth:' .. reward, images)
end
redis.call('HSET', job, 'digest', ARGV[2], 'images', images, 'ref', ARGV[4], 'created', now, 'state', 'queued',
  'rewards', cjson.encode(rewards), 'left', left, 'result_ttl', ARGV[6])
redis.call('PEXPIRE', job, ARGV[5])
return {'new'}
"""
)

# ARGV: reward, entry, job id, start, stop -> {ref, tries, waited ms}, or {} after dropping a part nobody waits for
BEGIN = (
    _NOW
    + _DROP
    + """
local job = P .. 'job:' .. ARGV[3]
local part = ARGV[1] .. ':' .. ARGV[4]
local state = redis.call('HGET', job, 'state')
if not (state == 'queued' or state == 'running') or redis.call('HEXISTS', job, 'result:' .. part) == 1 then
  drop(ARGV[1], ARGV[2], ARGV[5] - ARGV[4])
  return {}
end
redis.call('HSET', job, 'state', 'running')
redis.call('HINCRBY', P .. 'totals', ARGV[1] .. ':delivered', 1)
local tries = redis.call('HINCRBY', job, 'tries:' .. part, 1)
return {redis.call('HGET', job, 'ref'), tries, now - redis.call('HGET', job, 'created')}
"""
)

# ARGV: reward, entry, job id, start, stop, result JSON, reason for giving up or '', images without a score
# -> 1 if this result was stored, 0 if the part had one or its job is gone
FINISH = (
    _NOW
    + _DROP
    + """
local job = P .. 'job:' .. ARGV[3]
local state = redis.call('HGET', job, 'state')
local stored = 0
if (state == 'queued' or state == 'running')
    and redis.call('HSETNX', job, 'result:' .. ARGV[1] .. ':' .. ARGV[4], ARGV[6]) == 1 then
  stored = 1
  redis.call('HINCRBY', P .. 'totals', ARGV[1] .. ':scored', ARGV[5] - ARGV[4] - ARGV[8])
  redis.call('HINCRBY', P .. 'totals', ARGV[1] .. ':failed', ARGV[8])
  if redis.call('HINCRBY', job, 'left', -1) == 0 then
    redis.call('HSET', job, 'state', 'done')
    redis.call('PEXPIRE', job, redis.call('HGET', job, 'result_ttl'))
    redis.call('PUBLISH', P .. 'done', ARGV[3])
  end
  if ARGV[7] ~= '' then
    redis.call('HINCRBY', P .. 'totals', ARGV[1] .. ':given_up', 1)
    redis.call('XADD', P .. 'dead:' .. ARGV[1], 'MAXLEN', '~', 1000, '*', 'job', ARGV[3], 'start', ARGV[4],
      'stop', ARGV[5], 'reason', ARGV[7])
  end
end
drop(ARGV[1], ARGV[2], ARGV[5] - ARGV[4])
return stored
"""
)

# ARGV: reward, entry, job id, start, stop: a part that a worker began but will not finish goes to the others at once
GIVE_BACK = (
    _NOW
    + """
local stream = P .. 'stream:' .. ARGV[1]
redis.call('XACK', stream, 'workers', ARGV[2])
if redis.call('XDEL', stream, ARGV[2]) == 1 then
  redis.call('XADD', stream, '*', 'job', ARGV[3], 'start', ARGV[4], 'stop', ARGV[5])
  local job = P .. 'job:' .. ARGV[3]
  if redis.call('EXISTS', job) == 1 then
    redis.call('HINCRBY', job, 'tries:' .. ARGV[1] .. ':' .. ARGV[4], -1)
  end
end
return 1
"""
)

# ARGV: id -> the state it had, or nil. Running and waiting parts are dropped when a worker meets them.
CANCEL = (
    _NOW
    + """
local job = P .. 'job:' .. ARGV[1]
local state = redis.call('HGET', job, 'state')
if state == 'queued' or state == 'running' then
  redis.call('HSET', job, 'state', 'cancelled')
  redis.call('PEXPIRE', job, redis.call('HGET', job, 'result_ttl'))
  redis.call('PUBLISH', P .. 'done', ARGV[1])
elseif state then
  redis.call('DEL', job)
end
return state
"""
)

# ARGV: reward, worker id, info JSON, images of its largest part,
# ms after which silent workers are forgotten, ms of silence to pretend
HEARTBEAT = (
    _NOW
    + """
redis.call('ZADD', P .. 'seen', now - ARGV[6], ARGV[2])
redis.call('HSET', P .. 'info', ARGV[2], ARGV[3])
redis.call('ZADD', P .. 'served', now, ARGV[1])
redis.call('HSET', P .. 'max_batch', ARGV[1], ARGV[4])
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'seen', '-inf', now - ARGV[5])) do
  redis.call('ZREM', P .. 'seen', id)
  redis.call('HDEL', P .. 'info', id)
end
return 1
"""
)

# ARGV: ms after which a silent worker's reward is no longer served
# -> {{info JSON, ms since its last sign of life, depth of its reward}...}: all workers of the rewards that are served
WORKERS = (
    _NOW
    + """
local found = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', P .. 'seen', now - ARGV[1], '+inf')) do
  local info = redis.call('HGET', P .. 'info', id)
  if info then
    local depth = redis.call('GET', P .. 'depth:' .. cjson.decode(info)['reward']) or '0'
    table.insert(found, {info, now - redis.call('ZSCORE', P .. 'seen', id), tonumber(depth)})
  end
end
return found
"""
)
