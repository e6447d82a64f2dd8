// SPDX-License-Identifier: Apache-2.0

package tcpdemo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// LoadConfig configures a Load. Only Addr has to be set; of the numbers, zero
// stands for the default and a negative value for none.
type LoadConfig struct {
	// Addr is the server's "IP:port".
	Addr string
	// NewPerSecond is the rate of new connections; each makes one short request.
	// Default 1,000, at most 5,000.
	NewPerSecond float64
	// KeepAlive is the number of connections that stay. Default 500.
	KeepAlive int
	// RequestEvery is the mean time between two requests on each of them. Default
	// 1 s.
	RequestEvery time.Duration
	// MinBytes and MaxBytes bound the responses. Defaults 100 B and 16 kB.
	MinBytes, MaxBytes int64
	// SlowPart is the part of the requests on connections that stay whose
	// responses take 200 to 800 ms. Default 0.1.
	SlowPart float64
	// Timeout is how long connecting, and each response besides the time that it
	// is to take, may last. Default 10 s.
	Timeout time.Duration
	// Sources are the addresses that the clients connect from, in turn: a client
	// has a port for each connection, and it stays taken for a minute after
	// (TIME_WAIT). Default for a server at 127/8: 127.0.1.1 to 127.0.1.16; for
	// others, the kernel's choice.
	Sources []netip.Addr
	// Answered, when set, is called for each response, by several goroutines.
	Answered func(Answer)
	// Seed of the random choices. Default: 1.
	Seed uint64
}

// maxRate is the highest NewPerSecond.
const maxRate = 5000

func (cfg *LoadConfig) defaults() error {
	addr, err := netip.ParseAddrPort(cfg.Addr)
	if err != nil {
		return fmt.Errorf("check address: %w", err)
	}
	set := func(v *float64, fallback float64) {
		if *v == 0 {
			*v = fallback
		}
		*v = max(0, *v)
	}
	set(&cfg.NewPerSecond, 1000)
	set(&cfg.SlowPart, 0.1)
	if cfg.KeepAlive == 0 {
		cfg.KeepAlive = 500
	}
	if cfg.RequestEvery == 0 {
		cfg.RequestEvery = time.Second
	}
	if cfg.MinBytes == 0 {
		cfg.MinBytes = 100
	}
	if cfg.MaxBytes == 0 {
		cfg.MaxBytes = max(cfg.MinBytes, 16<<10)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second
	}
	if cfg.Seed == 0 {
		cfg.Seed = 1
	}
	if len(cfg.Sources) == 0 && addr.Addr().Is4() && addr.Addr().IsLoopback() {
		for i := range 16 {
			cfg.Sources = append(cfg.Sources, netip.AddrFrom4([4]byte{127, 0, 1, byte(i + 1)}))
		}
	}
	switch {
	case cfg.NewPerSecond > maxRate:
		return fmt.Errorf("check rate: %g new connections a second, at most %d", cfg.NewPerSecond, maxRate)
	case cfg.MinBytes < 0 || cfg.MaxBytes < cfg.MinBytes || cfg.MaxBytes > 1<<30:
		return fmt.Errorf("check sizes: %d to %d bytes; they have to be in order, and at most 1 GiB", cfg.MinBytes, cfg.MaxBytes)
	case cfg.RequestEvery < 0 || cfg.Timeout < 0:
		return fmt.Errorf("check times: a request every %v, timeout %v; they must not be negative", cfg.RequestEvery, cfg.Timeout)
	}
	return nil
}

// Load is clients at work. Make it with NewLoad.
type Load struct {
	cfg    LoadConfig
	rec    *recorder
	ctx    context.Context // ends everything at once
	cancel context.CancelFunc
	going  context.Context // ends when no more is to be begun
	stop   context.CancelFunc
	wg     sync.WaitGroup
	next   atomic.Uint32 // source
}

// NewLoad starts the clients. They work until Stop; ctx ends them at once.
// Stop has to be called in either case.
func NewLoad(ctx context.Context, cfg LoadConfig) (*Load, error) {
	if err := cfg.defaults(); err != nil {
		return nil, fmt.Errorf("start load: %w", err)
	}
	l := &Load{cfg: cfg, rec: newRecorder(cfg.Answered)}
	l.ctx, l.cancel = context.WithCancel(ctx)
	l.going, l.stop = context.WithCancel(l.ctx)
	if cfg.NewPerSecond > 0 {
		l.wg.Go(l.openNew)
	}
	for i := range max(0, cfg.KeepAlive) {
		l.wg.Go(func() { l.keep(i) })
	}
	return l, nil
}

// Stop begins nothing more, waits for the requests under way and returns the
// result.
func (l *Load) Stop() Result {
	l.stop()
	l.wg.Wait()
	l.cancel()
	return l.rec.snapshot()
}

// Snapshot is the result so far.
func (l *Load) Snapshot() Result { return l.rec.snapshot() }

// Long starts n connections of KindLong, each with one response of that size
// and duration. It returns when all of them have answered in part, or failed;
// done is closed when they have ended.
func (l *Load) Long(n int, bytes int64, over time.Duration) (done <-chan struct{}) {
	var begun, ended sync.WaitGroup
	begun.Add(n)
	for i := range n {
		run := func() {
			var once sync.Once
			began := func() { once.Do(begun.Done) }
			defer began()
			c, err := l.dial(KindLong)
			if err != nil {
				l.lost(KindLong, 0, "connect", err)
				return
			}
			defer c.close()
			c.began = began
			if _, err := c.do(query{seed: l.cfg.Seed<<32 + uint64(i), bytes: bytes, over: over, last: true}); err != nil {
				l.lost(KindLong, c.generation, "request", err)
			}
		}
		ended.Add(1)
		l.wg.Go(func() {
			defer ended.Done()
			run()
		})
	}
	begun.Wait()
	all := make(chan struct{})
	l.wg.Go(func() {
		ended.Wait()
		close(all)
	})
	return all
}

// lost records a loss, unless we ended the connection ourselves.
func (l *Load) lost(k Kind, generation int, what string, err error) {
	if l.ctx.Err() == nil {
		l.rec.lost(k, generation, what, err)
	}
}

// source is the next source address; nil leaves it to the kernel.
func (l *Load) source() net.Addr {
	if len(l.cfg.Sources) == 0 {
		return nil
	}
	a := l.cfg.Sources[int(l.next.Add(1))%len(l.cfg.Sources)]
	return net.TCPAddrFromAddrPort(netip.AddrPortFrom(a, 0))
}

// catchUp is the longest delay of this process after which it opens the
// connections that it missed. After more, so many at once would be another load.
const catchUp = 50 * time.Millisecond

// openNew opens new connections at the rate, whether the server answers or not.
func (l *Load) openNew() {
	rng := rand.New(rand.NewPCG(l.cfg.Seed, 0))
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	began := time.Now()
	var begun, skipped int64
	for {
		select {
		case <-l.going.Done():
			l.rec.update(func(r *Result) { r.Skipped += skipped })
			return
		case <-tick.C:
		}
		due := int64(time.Since(began).Seconds()*l.cfg.NewPerSecond) - begun
		if most := max(1, int64(l.cfg.NewPerSecond*catchUp.Seconds())); due > most {
			skipped += due - most
			begun += due - most
			due = most
		}
		begun += due
		for range due {
			q := query{seed: rng.Uint64(), bytes: l.size(rng), last: true}
			l.wg.Go(func() { l.once(q) })
		}
	}
}

func (l *Load) size(rng *rand.Rand) int64 {
	return l.cfg.MinBytes + rng.Int64N(l.cfg.MaxBytes-l.cfg.MinBytes+1)
}

// once is a connection for one request.
func (l *Load) once(q query) {
	c, err := l.dial(KindNew)
	if err != nil {
		l.lost(KindNew, 0, "connect", err)
		return
	}
	if _, err := c.do(q); err != nil {
		l.lost(KindNew, c.generation, "request", err)
		c.close()
		return
	}
	c.finish()
}

// reconnect is how long a client waits after it could not connect.
const reconnect = 500 * time.Millisecond

// keep is the i-th connection that stays. It is opened again whenever it ends.
func (l *Load) keep(i int) {
	rng := rand.New(rand.NewPCG(l.cfg.Seed, uint64(i)+1))
	// They begin spread over the time between two requests.
	sleep(l.going, time.Duration(rng.Int64N(int64(l.cfg.RequestEvery))))
	var again *query
	for l.going.Err() == nil {
		c, err := l.dial(KindKeepAlive)
		if err != nil {
			l.lost(KindKeepAlive, 0, "connect", err)
			again = nil
			sleep(l.going, reconnect)
			continue
		}
		again = l.use(c, rng, again)
		c.close()
	}
}

// use makes requests until the connection ends. It returns the request that has
// to be made again on another one.
func (l *Load) use(c *client, rng *rand.Rand, first *query) (again *query) {
	for l.going.Err() == nil {
		q := query{seed: rng.Uint64(), bytes: l.size(rng)}
		if rng.Float64() < l.cfg.SlowPart {
			q.over = 200*time.Millisecond + time.Duration(rng.Int64N(int64(600*time.Millisecond)))
		}
		if first != nil {
			q, first = *first, nil
		}
		told, err := c.do(q)
		switch {
		case errors.Is(err, errRaced):
			l.rec.update(func(r *Result) { r.Raced++ })
			return &q
		case err != nil:
			l.lost(KindKeepAlive, c.generation, "request", err)
			return nil
		case told:
			l.rec.update(func(r *Result) { r.ToldToClose++ })
			return nil
		}
		pause := l.cfg.RequestEvery/2 + time.Duration(rng.Int64N(int64(l.cfg.RequestEvery)))
		open, err := c.idle(l.going, time.Now().Add(pause))
		if err != nil {
			l.lost(KindKeepAlive, c.generation, "idle", err)
			return nil
		}
		if !open {
			l.rec.update(func(r *Result) { r.ClosedIdle++ })
			return nil
		}
	}
	return nil
}

// sleep waits, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
