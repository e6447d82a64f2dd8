// SPDX-License-Identifier: Apache-2.0

package wgdemo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"instar/dispatch"
	"instar/dispatch/wgbind"
	"instar/handover"
	"instar/internal/build"
)

// GatewayConfig is how a Gateway works. Config has to be set.
type GatewayConfig struct {
	Config *Config
	// Interface is the TUN device's name. Default wg0.
	Interface string
	// Addr is the IP address of the UDP socket. Default: all, of both families.
	Addr netip.Addr
	// Workers is the number of sockets. Default 2.
	Workers int
	// Root is the folder on a bpffs for the group's pins. Default dispatch.DefaultRoot.
	Root string
	// Pinless makes a group without pins, which goes on as descriptors.
	Pinless bool
	// Service owns the group. Default wgdemo.
	Service string
	// Control is the path of the control socket. Default "@wgdemo-INTERFACE".
	Control string
	// Build names the build. Default: from the executable.
	Build string

	// Hold is how long the TUN device is not read after an upgrade while known peers have
	// not come over. Later their packets wait in the process, which keeps few. Default 100 ms.
	Hold time.Duration
	// Deadline is how long this process serves its sessions after it was superseded for
	// good. Default 10 s.
	Deadline time.Duration
	// UpgradeTimeout and Probation are those of handover.Options.
	UpgradeTimeout time.Duration
	Probation      time.Duration
	// Command is the successor's. Default: the command line of this process.
	Command        []string
	Stdout, Stderr *os.File

	// Event is told what happens. Default: nobody is.
	Event func(Event)
	// Logger receives what an operator should know. Default: nothing is logged.
	Logger *slog.Logger
}

// EventKind is what happened.
type EventKind string

// Events, in the order in which a process has them.
const (
	// EventReady: new handshakes come to this process.
	EventReady EventKind = "ready"
	// EventMoved: all peers that had a session have one with this process.
	EventMoved EventKind = "moved"
	// EventSuperseded: another process has taken over for good.
	EventSuperseded EventKind = "superseded"
	// EventReinstated: this process serves again, since its successor failed.
	EventReinstated EventKind = "reinstated"
	// EventLeft: nothing comes to this process any more, and it ends.
	EventLeft EventKind = "left"
)

// Event is something that happened in a gateway.
type Event struct {
	Kind       EventKind `json:"event"`
	Generation uint32    `json:"generation"`
	PID        int       `json:"pid"`
	// Addr is where the gateway listens.
	Addr string `json:"addr,omitempty"`
	// Peers is, of EventMoved, how many came over, and of EventReady how many are asked to.
	Peers int `json:"peers,omitempty"`
	// Milliseconds is how long it took: of EventMoved since EventReady, of EventLeft since
	// EventSuperseded.
	Milliseconds int64 `json:"ms,omitempty"`
	// Reason is, of EventLeft, what ended the drain.
	Reason string `json:"reason,omitempty"`
}

// Gateway is a WireGuard gateway.
type Gateway struct {
	cfg GatewayConfig
	log *slog.Logger

	stop     chan struct{}
	stopOnce sync.Once
	serving  chan struct{}

	h     *handover.Handover
	group *dispatch.Group
	gen   *dispatch.Generation
	bind  *wgbind.Bind
	gate  *gate
	dev   *device.Device

	after  *line // to a successor
	before *line // to the predecessor, nil when there is none

	background sync.WaitGroup
	mu         sync.Mutex
	known      []peerStatus  // of the predecessor's state
	number     int           // of that
	coming     *introduction // of those peers, nil before the first activation
	served     bool
	told       map[device.NoisePublicKey]peerStatus // what a successor knows
}

// beforeReady is for tests: it is called when a gateway has its predecessor's state.
var beforeReady = func(*Gateway) {}

// NewGateway checks the configuration.
func NewGateway(cfg GatewayConfig) (*Gateway, error) {
	if cfg.Config == nil {
		return nil, errors.New("check configuration: Config is not set")
	}
	if cfg.Interface == "" {
		cfg.Interface = "wg0"
	}
	if len(cfg.Interface) > 15 {
		return nil, fmt.Errorf("check configuration: the name of the interface, %q, has more than 15 bytes", cfg.Interface)
	}
	if !cfg.Addr.IsValid() {
		cfg.Addr = netip.IPv6Unspecified()
	}
	if cfg.Workers == 0 {
		cfg.Workers = 2
	}
	if cfg.Service == "" {
		cfg.Service = "wgdemo"
	}
	if cfg.Control == "" {
		cfg.Control = "@wgdemo-" + cfg.Interface
	}
	if cfg.Build == "" {
		cfg.Build = build.ID()
	}
	if cfg.Hold == 0 {
		cfg.Hold = 100 * time.Millisecond
	}
	if cfg.Deadline == 0 {
		cfg.Deadline = 10 * time.Second
	}
	if cfg.Event == nil {
		cfg.Event = func(Event) {}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Gateway{cfg: cfg, log: cfg.Logger, stop: make(chan struct{}), serving: make(chan struct{})}, nil
}

// Stop makes Run end. In its probation it hands back to its predecessor.
func (g *Gateway) Stop() { g.stopOnce.Do(func() { close(g.stop) }) }

// Upgrade starts a successor, and returns when it has taken over for good.
func (g *Gateway) Upgrade(ctx context.Context) error {
	select {
	case <-g.serving:
		return g.h.Upgrade(ctx)
	default:
		return handover.ErrNotActive
	}
}

// Run serves until the gateway was replaced and its peers have gone over, or until it is
// stopped. When ctx is done it ends at once.
func (g *Gateway) Run(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := g.openHandover(ctx); err != nil {
		return err
	}
	defer func() {
		cancel()
		err = errors.Join(err, g.close(err))
	}()
	if err := g.open(ctx); err != nil {
		return err
	}
	g.h.OnActivate(func(context.Context) error { return g.activate(ctx) })
	g.h.OnHandover(g.writeState)
	beforeReady(g)
	if err := g.h.Ready(ctx); err != nil {
		return err
	}
	close(g.serving)
	g.background.Go(func() { g.forward(ctx) })
	g.background.Go(func() { g.tellLateUntil(ctx.Done()) })
	g.log.Info("serving", "generation", g.gen.Number(), "interface", g.cfg.Interface, "addr", g.addr(), "peers", len(g.cfg.Config.Peers))
	g.mu.Lock()
	asked := g.coming.peers
	g.mu.Unlock()
	g.event(Event{Kind: EventReady, Addr: g.addr(), Peers: asked})

	select {
	case <-ctx.Done():
		return nil
	case <-g.stop:
		return g.leave(ctx)
	case <-g.h.Superseded():
	}
	superseded := time.Now()
	g.log.Info("superseded", "generation", g.gen.Number(), "reason", g.h.Err())
	g.event(Event{Kind: EventSuperseded})
	report, err := g.drain(ctx)
	if err != nil {
		return err
	}
	g.log.Info("left", "generation", g.gen.Number(), "reason", report.Reason, "after", time.Since(superseded), "withheld", g.bind.Stats().Withheld)
	g.event(Event{Kind: EventLeft, Reason: report.Reason, Milliseconds: time.Since(superseded).Milliseconds()})
	return nil
}

func (g *Gateway) event(e Event) {
	e.PID, e.Generation = os.Getpid(), g.gen.Number()
	g.cfg.Event(e)
}

func (g *Gateway) addr() string { return g.gen.Conns()[0].LocalAddr().String() }

// openHandover finds the predecessor, and waits while that one is busy with another
// upgrade.
func (g *Gateway) openHandover(ctx context.Context) (err error) {
	options := handover.Options{
		Name:           g.cfg.Service,
		Build:          g.cfg.Build,
		Socket:         g.cfg.Control,
		Command:        g.cfg.Command,
		Signals:        []os.Signal{}, // Main's
		UpgradeTimeout: g.cfg.UpgradeTimeout,
		Probation:      g.cfg.Probation,
		Stdout:         g.cfg.Stdout,
		Stderr:         g.cfg.Stderr,
		Logger:         g.log,
	}
	for {
		g.h, err = handover.NewContext(ctx, options)
		if !handover.Retryable(err) {
			return err
		}
		g.log.Info("waiting for the predecessor", "reason", err)
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// open gets everything ready that the predecessor does not notice.
func (g *Gateway) open(ctx context.Context) error {
	if err := g.openLines(ctx); err != nil {
		return err
	}
	if err := g.openTUN(); err != nil {
		return err
	}
	var err error
	if r := g.h.State(); r != nil {
		// Without it the peers come by themselves.
		if g.known, g.number, err = readState(r); err != nil {
			g.log.Warn("the peers' endpoints are not known", "error", err)
		}
	}
	options := dispatch.Options{
		Address:       netip.AddrPortFrom(g.cfg.Addr, g.cfg.Config.ListenPort).String(),
		Service:       g.cfg.Service,
		Steering:      dispatch.SteeringWireGuard,
		Root:          g.cfg.Root,
		Build:         g.cfg.Build[:min(len(g.cfg.Build), 31)],
		ReceiveBuffer: 4 << 20,
		Logger:        g.log,
	}
	if g.cfg.Pinless {
		options.Files = g.h
	}
	if g.group, err = dispatch.Open(options); err != nil {
		return err
	}
	if g.gen, err = g.group.Join(g.cfg.Workers); err != nil {
		return err
	}
	if g.bind, err = wgbind.New(g.gen, wgbind.Options{Logger: g.log}); err != nil {
		return err
	}
	g.dev = device.NewDevice(g.gate, g.bind, deviceLogger(ctx, g.log))
	endpoints := map[device.NoisePublicKey]netip.AddrPort{}
	for _, p := range g.known {
		endpoints[p.key] = p.endpoint
	}
	if err := g.dev.IpcSet(g.cfg.Config.uapi(endpoints)); err != nil {
		return fmt.Errorf("configure the device: %w", err)
	}
	g.refuseReplays(g.known)
	return nil
}

// refuseReplays makes the device refuse what the predecessor would refuse.
func (g *Gateway) refuseReplays(known []peerStatus) {
	for _, p := range known {
		if peer := g.dev.LookupPeer(p.key); peer != nil {
			refuseUntil(peer, p.timestamp)
		}
	}
}

// deviceLogger is a device's logger on a structured one.
func deviceLogger(ctx context.Context, log *slog.Logger) *device.Logger {
	write := func(level slog.Level) func(string, ...any) {
		if !log.Enabled(ctx, level) {
			return device.DiscardLogf
		}
		return func(format string, args ...any) { log.Log(context.Background(), level, fmt.Sprintf(format, args...)) }
	}
	return &device.Logger{Verbosef: write(slog.LevelDebug), Errorf: write(slog.LevelError)}
}

// tunName is the TUN device's among the descriptors that are handed over.
const tunName = "tun"

// openTUN gets the TUN device from the predecessor, or makes one.
func (g *Gateway) openTUN() error {
	var inner tun.Device
	file, err := g.h.File(tunName)
	switch {
	case err == nil:
		mtu := g.cfg.Config.MTU
		if inner, err = tun.CreateTUNFromFile(file, mtu); err != nil {
			return fmt.Errorf("use the predecessor's TUN device: %w", errors.Join(err, file.Close()))
		}
	case errors.Is(err, handover.ErrNotInherited):
		if inner, err = tun.CreateTUN(g.cfg.Interface, g.cfg.Config.MTU); err != nil {
			return fmt.Errorf("make TUN device %s: %w", g.cfg.Interface, err)
		}
		err = errors.Join(setUpTUN(g.cfg.Interface, g.cfg.Config.Addresses), g.h.Add(tunName, inner.File()))
		if err != nil {
			return errors.Join(err, inner.Close())
		}
	default:
		return err
	}
	if g.gate, err = newGate(inner); err != nil {
		return errors.Join(err, inner.Close())
	}
	return nil
}

// tunQueue is how many packets wait in the TUN device while nobody reads it.
const tunQueue = 4000

// setUpTUN gives the interface its addresses. Routes to further networks of the peers are
// the administrator's matter.
func setUpTUN(name string, addresses []netip.Prefix) error {
	if err := addAddresses(name, addresses); err != nil {
		return err
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find device %s: %w", name, err)
	}
	if err := netlink.LinkSetTxQLen(link, tunQueue); err != nil {
		return fmt.Errorf("set the queue length of interface %s: %w", name, err)
	}
	return linkUp(name)
}

// openLines makes the line to a successor, and takes the predecessor's. Each generation has
// one.
func (g *Gateway) openLines(ctx context.Context) error {
	if p, ok := g.h.Predecessor(); ok {
		name := lineName(p.Generation)
		c, err := g.h.Conn(name)
		if err != nil && !errors.Is(err, handover.ErrNotInherited) {
			return err
		}
		if err == nil {
			g.h.Remove(name)
			g.before = &line{conn: c}
		}
	}
	near, far, err := newLine()
	if err != nil {
		return err
	}
	g.after = near
	// It stays open as long as the process lives, so that it can be handed over.
	g.background.Go(func() {
		defer far.Close()
		near.receive(g.log, func(w word) { near.answered(w.Moved) })
	})
	return g.h.Add(lineName(g.h.Generation()), far)
}

func lineName(generation int) string { return fmt.Sprintf("peers-%d", generation) }

// activate makes new handshakes come here, and asks the peers to. It runs at the commit,
// and again when a successor failed.
func (g *Gateway) activate(ctx context.Context) error {
	if err := g.dev.Up(); err != nil {
		return fmt.Errorf("bring the device up: %w", err)
	}
	if err := g.gen.Activate(); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.served {
		// Whatever the successor did, the peers are to come back.
		known, err := statusOf(g.dev)
		if err != nil {
			return err
		}
		g.log.Warn("active again, since the successor failed", "generation", g.gen.Number())
		g.event(Event{Kind: EventReinstated})
		g.after.forget()
		g.coming = nil // what was before does not matter
		g.coming = g.introduce(ctx, known, g.number, true)
		return nil
	}
	g.served = true
	g.coming = g.introduce(ctx, g.known, g.number, false)
	if g.before != nil {
		g.background.Go(func() { g.before.receive(g.log, func(w word) { g.late(ctx, w) }) })
	}
	return nil
}

// introduce asks those of the peers that may have a session, and tells the predecessor when
// all that it told of, up to the number, have come. Its caller holds mu.
func (g *Gateway) introduce(ctx context.Context, known []peerStatus, number int, anew bool) *introduction {
	var recent []peerStatus
	for _, p := range known {
		if p.recent(time.Now()) {
			recent = append(recent, p)
		}
	}
	began, earlier := time.Now(), g.coming
	coming := introduce(ctx, g.dev, recent, anew)
	g.background.Go(func() {
		<-coming.done
		if earlier != nil {
			<-earlier.joined
			coming.all = coming.all && earlier.all
		}
		if !coming.all {
			g.log.Info("not all peers answered", "generation", g.gen.Number(), "peers", coming.peers)
		}
		close(coming.joined)
		if !coming.all {
			return
		}
		if g.before != nil {
			g.before.send(word{Moved: &number})
		}
		if coming.peers > 0 {
			g.event(Event{Kind: EventMoved, Peers: coming.peers, Milliseconds: time.Since(began).Milliseconds()})
		}
	})
	return coming
}

// late takes over peers that came to the predecessor when it had written its state.
func (g *Gateway) late(ctx context.Context, w word) {
	peers, err := w.peers()
	if err != nil {
		g.log.Warn("late peers are not known", "error", err)
		return
	}
	g.refuseReplays(peers)
	mine, err := statusOf(g.dev)
	if err != nil {
		return // closed
	}
	handshakes := map[device.NoisePublicKey]time.Time{}
	for _, p := range mine {
		handshakes[p.key] = p.handshake
	}
	var come []peerStatus
	for _, p := range peers {
		if own, known := handshakes[p.key]; !known || own.After(p.handshake) {
			continue // of another configuration, or here already
		}
		if err := g.dev.IpcSet(fmt.Sprintf("public_key=%x\nupdate_only=true\nendpoint=%v\n", p.key[:], p.endpoint)); err != nil {
			g.log.Warn("late peer is not known", "error", err)
			continue
		}
		come = append(come, p)
	}
	g.log.Debug("late peers", "generation", g.gen.Number(), "told", len(peers), "asked", len(come))
	g.mu.Lock()
	defer g.mu.Unlock()
	g.coming = g.introduce(ctx, come, w.Number, true)
}

// forward reads the TUN device as long as this process, and no other, is to.
func (g *Gateway) forward(ctx context.Context) {
	for {
		lease, err := g.h.Lease(ctx)
		if err != nil {
			return // superseded, or closed
		}
		g.mu.Lock()
		coming := g.coming
		g.mu.Unlock()
		hold := time.NewTimer(g.cfg.Hold)
		select {
		case <-coming.done:
		case <-hold.C:
		case <-lease.Context().Done():
		}
		hold.Stop()
		err = g.gate.setOpen(true)
		if err == nil {
			<-lease.Context().Done()
			err = g.gate.setOpen(false)
		}
		// A successor takes over now.
		g.tellLate()
		lease.Release()
		if err != nil {
			g.log.Error("the TUN device is not read any more", "error", err)
			return
		}
	}
}

func (g *Gateway) writeState(_ context.Context, w io.Writer) error {
	peers, err := statusOf(g.dev)
	if err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.told = map[device.NoisePublicKey]peerStatus{}
	for _, p := range peers {
		g.told[p.key] = p
	}
	return writeState(w, peers, g.after.last())
}

// tellLate tells the successor which peers have come, or moved, since it was told last.
func (g *Gateway) tellLate() {
	peers, err := statusOf(g.dev)
	if err != nil {
		return // closed
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.told == nil {
		return // there is none
	}
	var news []peerStatus
	for _, p := range peers {
		if p.endpoint.IsValid() && p != g.told[p.key] {
			g.told[p.key] = p
			news = append(news, p)
		}
	}
	if len(news) > 0 {
		g.after.tell(news)
	}
}

// tellEvery is how often a process that is superseded, or may be soon, looks for peers that
// came to it nevertheless: their first message was in its queue.
const tellEvery = 50 * time.Millisecond

func (g *Gateway) tellLateUntil(done <-chan struct{}) {
	tick := time.NewTicker(tellEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			if g.gen.State() == dispatch.StateDraining {
				g.tellLate()
			}
		case <-done:
			return
		}
	}
}

// drain serves the sessions until the peers have gone.
func (g *Gateway) drain(ctx context.Context) (dispatch.DrainReport, error) {
	done := make(chan struct{})
	draining, cancel := context.WithCancel(ctx)
	defer cancel()
	g.background.Go(func() {
		select {
		case <-g.after.moved(draining):
			// What they had sent before they moved.
			select {
			case <-time.After(linger):
				close(done)
			case <-draining.Done():
			}
		case <-g.stop:
			close(done)
		case <-draining.Done():
		}
	})
	for {
		report, err := g.gen.Drain(ctx, dispatch.DrainOptions{Done: done, Deadline: g.cfg.Deadline})
		switch {
		case errors.Is(err, dispatch.ErrReinstated):
			// By hand (instar rollback). There is no way back to the TUN device.
			g.log.Warn("active again, and superseded for good: activate another generation")
			if _, err := g.gen.Wait(ctx, dispatch.StateDraining, dispatch.StateGone); err != nil {
				return report, nil
			}
		case ctx.Err() != nil:
			return report, nil
		default:
			return report, err
		}
	}
}

// linger is how long packets of a session may be on their way after the peer has a newer
// one.
const linger = 500 * time.Millisecond

// leave ends a gateway that was stopped.
func (g *Gateway) leave(ctx context.Context) error {
	probation := g.h.Status().Probation
	g.log.Info("stopping", "generation", g.gen.Number(), "probation", probation)
	_ = g.h.Close() // the predecessor of one in its probation takes back
	if !probation {
		return nil
	}
	limit, cancel := context.WithTimeout(ctx, g.cfg.Deadline)
	defer cancel()
	if _, err := g.gen.Wait(limit, dispatch.StateDraining, dispatch.StateGone); err != nil {
		return nil // it died
	}
	_, err := g.gen.Drain(ctx, dispatch.DrainOptions{Idle: linger, Deadline: g.cfg.Deadline})
	if errors.Is(err, dispatch.ErrReinstated) || ctx.Err() != nil {
		return nil
	}
	return err
}

// close releases everything. failed is why the gateway ends, if it does for a reason.
func (g *Gateway) close(failed error) error {
	var err error
	if e := g.h.Abort(failed); !errors.Is(e, handover.ErrClosed) {
		err = e
	}
	switch {
	case g.dev != nil:
		g.dev.Close() // with the gate
	case g.gate != nil:
		err = errors.Join(err, g.gate.Close())
	}
	for _, l := range []*line{g.after, g.before} {
		if l != nil {
			err = errors.Join(err, l.conn.Close()) // ends who reads it
		}
	}
	g.background.Wait()
	if g.gen != nil {
		err = errors.Join(err, g.gen.Close())
	}
	if g.group != nil {
		err = errors.Join(err, g.group.Close())
	}
	return err
}
