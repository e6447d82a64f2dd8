// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/device"

	"instar/internal/sandbox"
)

const (
	readyPatience = 20 * time.Second
	leavePatience = 40 * time.Second
	// leadIn and leadOut are traffic before the first and after the last upgrade, pause that
	// between two.
	leadIn, pause, leadOut = time.Second, 500 * time.Millisecond, time.Second
	// probation is the gateways'.
	probation = 500 * time.Millisecond
)

// scenarios are what happens under load.
var scenarios = map[string]func(*player, context.Context) error{
	"": (*player).upgrades,
	// For the tests: what kill -9 does in the probation.
	"kill successor":   (*player).killSuccessor,
	"kill predecessor": (*player).killPredecessor,
	"late peer":        (*player).latePeer,
	// Without an upgrade, which has to show a loss.
	"restart": (*player).restart,
}

// player plays a scenario.
type player struct {
	*sandbox.Player[Progress, Report]
	task  task
	began time.Time

	config  *os.File // the gateways' configuration, under its name
	peers   []*peer
	visitor *peer
	load    *load
	result  Result

	mu       sync.Mutex
	gateways []*process
	active   uint32
}

// process is a gateway. It knows when it announced what.
type process struct {
	number int
	*sandbox.Process
	moments map[EventKind]*moment
}

// moment is when an event came first.
type moment struct {
	came  chan struct{} // closed then
	once  sync.Once
	at    time.Time
	event Event
}

func (p *player) play(ctx context.Context) (r *Result, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	p.result = Result{Method: "instar", MovedMS: []int64{}, LeaveMS: []int64{}}
	defer p.killAll()
	defer func() { err = errors.Join(err, p.release()) }()
	if err := p.makePeers(); err != nil {
		return nil, err
	}
	if _, err := p.start(ctx); err != nil {
		return nil, err
	}
	visitor := p.visitor
	if p.task.Scenario == "late peer" {
		visitor = nil
	}
	if p.load, err = startLoad(ctx, p.peers, visitor); err != nil {
		return nil, fmt.Errorf("start the load: %w", err)
	}
	loaded := true
	defer func() {
		if loaded {
			cancel() // ends it at once
			p.load.stop()
		}
	}()
	var reporting sync.WaitGroup
	defer reporting.Wait()
	report, stopReporting := context.WithCancel(ctx)
	defer stopReporting()
	reporting.Go(func() { p.report(report) })
	p.say("%d peers have a session, and a TCP connection in it", len(p.peers))

	sleep(ctx, leadIn)
	if err := scenarios[p.task.Scenario](p, ctx); err != nil {
		return nil, err
	}
	sleep(ctx, leadOut)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	loaded = false
	p.result.Counts = p.load.finish()
	stopReporting()
	return &p.result, p.end(ctx)
}

// makePeers makes the peers and the gateway's configuration.
func (p *player) makePeers() error {
	gateway, err := newKeyPair()
	if err != nil {
		return err
	}
	log := &device.Logger{Verbosef: device.DiscardLogf, Errorf: device.DiscardLogf}
	text := fmt.Sprintf("[Interface]\nPrivateKey = %s\nListenPort = %d\nAddress = %v\n",
		base64.StdEncoding.EncodeToString(gateway.private[:]), defaultPort, innerNetwork)
	for i := 1; i <= p.task.Options.Peers+1; i++ {
		one, err := newPeer(i, gateway.public, log)
		if err != nil {
			return err
		}
		if i > p.task.Options.Peers {
			p.visitor = one
		} else {
			p.peers = append(p.peers, one)
		}
		text += fmt.Sprintf("\n[Peer]\nPublicKey = %s\nAllowedIPs = %v\n",
			base64.StdEncoding.EncodeToString(one.keys.public[:]), netip.PrefixFrom(one.inner, 32))
	}
	return p.writeConfig(text)
}

// writeConfig writes a file that nobody has to remove: it is in memory, and the gateways
// find it as long as this process lives.
func (p *player) writeConfig(text string) error {
	fd, err := unix.MemfdCreate("wg0.conf", unix.MFD_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("memfd_create", err)
	}
	p.config = os.NewFile(uintptr(fd), fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd))
	if _, err := p.config.WriteString(text); err != nil {
		return fmt.Errorf("write configuration: %w", err)
	}
	return nil
}

func (p *player) release() (err error) {
	for _, one := range p.peers {
		err = errors.Join(err, one.close())
	}
	if p.visitor != nil {
		err = errors.Join(err, p.visitor.close())
	}
	if p.config != nil {
		err = errors.Join(err, p.config.Close())
	}
	return err
}

// upgrades replaces the gateway again and again.
func (p *player) upgrades(ctx context.Context) error {
	for i := range p.task.Options.Upgrades {
		old := p.last()
		began := time.Now()
		next, err := p.start(ctx)
		if err != nil {
			return err
		}
		p.say("upgrade %d of %d: generation %d (pid %d) serves, %d ms after its start", i+1, p.task.Options.Upgrades,
			next.number, next.PID, next.moments[EventReady].at.Sub(began).Milliseconds())
		if err := p.gone(ctx, old); err != nil {
			return err
		}
		p.result.Upgrades++
		ready := next.moments[EventReady].at
		leave := old.EndedAt().Sub(ready).Milliseconds()
		p.result.LeaveMS = append(p.result.LeaveMS, leave)
		text := "not all peers had moved"
		select {
		case <-next.moments[EventMoved].came:
			moved := next.moments[EventMoved].event.Milliseconds
			p.result.MovedMS = append(p.result.MovedMS, moved)
			text = fmt.Sprintf("its peers had moved after %d ms", moved)
		default:
		}
		p.say("generation %d (pid %d) ended %d ms after that with %s: %s", old.number, old.PID, leave, old.How(), text)
		sleep(ctx, pause)
	}
	return ctx.Err()
}

// killSuccessor kills a successor in its probation, and upgrades then.
func (p *player) killSuccessor(ctx context.Context) error {
	old := p.last()
	next, err := p.start(ctx)
	if err != nil {
		return err
	}
	// The peers send with its sessions by now.
	if _, err := p.wait(ctx, next, EventMoved, readyPatience); err != nil {
		return err
	}
	next.Kill()
	p.forget(next)
	p.say("generation %d was killed in its probation", next.number)
	if _, err := p.wait(ctx, old, EventReinstated, readyPatience); err != nil {
		return err
	}
	p.say("generation %d serves again", old.number)
	if err := p.talk(ctx); err != nil {
		return err
	}
	return p.upgrades(ctx)
}

// killPredecessor kills a predecessor in the probation of its successor, and upgrades
// then.
func (p *player) killPredecessor(ctx context.Context) error {
	old := p.last()
	next, err := p.start(ctx)
	if err != nil {
		return err
	}
	if _, err := p.wait(ctx, next, EventMoved, readyPatience); err != nil {
		return err
	}
	old.Kill()
	p.forget(old)
	p.say("generation %d was killed in the probation of its successor", old.number)
	if err := p.talk(ctx); err != nil {
		return err
	}
	return p.upgrades(ctx)
}

// eventWaiting is of a successor that has the state and is not ready until the file that
// envWait names is there. Only the test binary knows both.
const eventWaiting EventKind = "waiting"

const envWait = "WGDEMO_TEST_WAIT"

// latePeer makes a peer come when the state is written and the predecessor still serves.
func (p *player) latePeer(ctx context.Context) error {
	old := p.last()
	dir, err := os.MkdirTemp("", "wgdemo-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "go on")
	next, err := p.launch(envWait + "=" + file)
	if err != nil {
		return err
	}
	if _, err := p.wait(ctx, next, eventWaiting, readyPatience); err != nil {
		return err
	}
	// It has never been there before, so the successor cannot know where it is.
	if err := errors.Join(p.visitor.up(), p.load.knock(ctx, p.visitor)); err != nil {
		return fmt.Errorf("the late peer: %w", err)
	}
	theirs, err := p.visitor.listenUDP(echoPort)
	if err != nil {
		return err
	}
	p.load.serve(theirs)
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		return err
	}
	if _, err := p.wait(ctx, next, EventReady, readyPatience); err != nil {
		return err
	}
	// One packet each way: none is lost.
	began := time.Now()
	c, err := net.Dial("udp4", netip.AddrPortFrom(p.visitor.inner, echoPort).String())
	if err != nil {
		return err
	}
	defer c.Close()
	b := []byte("late")
	err = c.SetDeadline(time.Now().Add(handshakeLimit))
	if err == nil {
		_, err = c.Write(b)
	}
	if err == nil {
		_, err = c.Read(b)
	}
	if err == nil {
		err = p.load.knock(ctx, p.visitor)
	}
	if err != nil {
		return fmt.Errorf("the late peer after the upgrade: %w", err)
	}
	p.say("the late peer is served, %d ms after the upgrade", time.Since(began).Milliseconds())
	p.result.Upgrades++
	return p.gone(ctx, old)
}

// restart stops the gateway and starts it again.
func (p *player) restart(ctx context.Context) error {
	old := p.last()
	old.Signal(unix.SIGTERM)
	if err := p.gone(ctx, old); err != nil {
		return err
	}
	if _, err := p.start(ctx); err != nil {
		return err
	}
	return p.talk(ctx)
}

// talk finds out whether every peer is answered.
func (p *player) talk(ctx context.Context) error {
	began := time.Now()
	for _, one := range p.peers {
		if err := p.load.insist(ctx, one); err != nil {
			return fmt.Errorf("peer %d has no answer: %w", one.number, err)
		}
	}
	p.say("every peer is answered, the last after %d ms", time.Since(began).Milliseconds())
	return nil
}

// last is the gateway that was started last.
func (p *player) last() *process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gateways[len(p.gateways)-1]
}

// forget takes a process that was killed out of those that have to end in order.
func (p *player) forget(g *process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gateways = slices.DeleteFunc(p.gateways, func(other *process) bool { return other == g })
}

// start starts a gateway and waits until it is ready.
func (p *player) start(ctx context.Context) (*process, error) {
	g, err := p.launch()
	if err != nil {
		return nil, err
	}
	m, err := p.wait(ctx, g, EventReady, readyPatience)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.active = m.event.Generation
	return g, nil
}

// probation is that of the next gateway's successor. Whoever is killed in it is killed in time,
// however slow the machine is.
func (p *player) probation() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.gateways) == 0 && strings.HasPrefix(p.task.Scenario, "kill") {
		return 10 * time.Second
	}
	return probation
}

// launch starts a gateway.
func (p *player) launch(environ ...string) (*process, error) {
	p.mu.Lock()
	number := 1
	if n := len(p.gateways); n > 0 {
		number = p.gateways[n-1].number + 1
	}
	p.mu.Unlock()
	g := &process{number: number, moments: map[EventKind]*moment{}}
	for _, kind := range []EventKind{EventReady, EventMoved, EventSuperseded, EventReinstated, EventLeft, eventWaiting} {
		g.moments[kind] = &moment{came: make(chan struct{})}
	}
	args := append(slices.Clone(p.task.Program.Gateway), "serve", "--json", "--pinless", "--config", p.config.Name(),
		"--probation", p.probation().String())
	var err error
	if g.Process, err = p.Starter.Start(p.task.Program.Self, args, environ, g.line); err != nil {
		return nil, fmt.Errorf("start gateway %d: %w", number, err)
	}
	p.mu.Lock()
	p.gateways = append(p.gateways, g)
	p.mu.Unlock()
	return g, nil
}

// line takes a line of a gateway's output.
func (g *process) line(line []byte) {
	var e Event
	if json.Unmarshal(line, &e) != nil {
		return
	}
	if m := g.moments[e.Kind]; m != nil {
		m.once.Do(func() {
			m.at, m.event = time.Now(), e
			close(m.came)
		})
	}
}

// wait waits for an event of a gateway.
func (p *player) wait(ctx context.Context, g *process, kind EventKind, patience time.Duration) (*moment, error) {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	m := g.moments[kind]
	select {
	case <-m.came:
		return m, nil
	case <-g.Ended():
		return nil, fmt.Errorf("gateway %d ended with %s%s", g.number, g.How(), g.Tail.Because())
	case <-timer.C:
		return nil, fmt.Errorf("gateway %d is not %s after %v%s", g.number, kind, patience, g.Tail.Because())
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// gone waits until a gateway has ended in order.
func (p *player) gone(ctx context.Context, g *process) error {
	if !g.Wait(ctx, leavePatience) {
		if err := ctx.Err(); err != nil {
			return err
		}
		p.problem("gateway %d has not ended after %v%s", g.number, leavePatience, g.Tail.Because())
		g.Kill()
	} else if g.ExitCode() != 0 {
		p.problem("gateway %d ended with %s%s", g.number, g.How(), g.Tail.Because())
	}
	return nil
}

// end stops the gateway.
func (p *player) end(ctx context.Context) error {
	g := p.last()
	g.Signal(unix.SIGTERM)
	return p.gone(ctx, g)
}

// killAll makes sure that no gateway is left.
func (p *player) killAll() {
	p.mu.Lock()
	gateways := slices.Clone(p.gateways)
	p.mu.Unlock()
	for _, g := range gateways {
		g.Kill()
	}
}

func (p *player) say(format string, args ...any) { p.tell(false, fmt.Sprintf(format, args...)) }

// problem records what makes the run fail.
func (p *player) problem(format string, args ...any) {
	text := strings.TrimSpace(fmt.Sprintf(format, args...))
	p.result.Problems = append(p.result.Problems, text)
	p.tell(true, text)
}

// tell sends progress.
func (p *player) tell(bad bool, text string) {
	m := Progress{At: time.Since(p.began), Of: leadIn + leadOut + time.Duration(p.task.Options.Upgrades)*(probation+linger+2*pause), Text: text, Bad: bad}
	if p.load != nil {
		c := p.load.snapshot()
		m.Handshakes, m.TCPBytes, m.Lost = c.Handshakes, c.TCPBytes, c.Lost()
	}
	p.mu.Lock()
	m.Active = p.active
	for _, g := range p.gateways {
		select {
		case <-g.Ended():
		default:
			m.Processes++
		}
	}
	p.mu.Unlock()
	p.Progress(m)
}

// report tells how it is going until ctx ends.
func (p *player) report(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			p.tell(false, "")
		}
	}
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
