// SPDX-License-Identifier: Apache-2.0

package quicdemo

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"instar/internal/content"
	"instar/internal/testutil"
)

// tcpClient is an HTTP client in the namespace that asks over TCP.
func (g *group) tcpClient(t testing.TB, h2 bool) *http.Client {
	transport := &http.Transport{
		ForceAttemptHTTP2: h2,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // #nosec G402: a certificate of the test's server
		DialContext: func(_ context.Context, network, _ string) (c net.Conn, err error) {
			g.ns.Run(func() { c, err = net.Dial(network, groupAddr) })
			return c, err
		},
	}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: patience}
}

// get downloads and returns the generation that answered.
func getTCP(c *http.Client, seed uint64, n int64, ms int) (*http.Response, error) {
	resp, err := c.Get(fmt.Sprintf("https://localhost/bytes/%d?seed=%d&ms=%d", n, seed, ms))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("status %s", resp.Status)
	}
	return resp, content.Verify(resp.Body, seed, n, func(int64) {})
}

// HTTP/1.1, HTTP/2 and HTTP/3 at one port go from generation to generation
// together, and none of them loses a request (B2, F4).
func TestUpgradeAllVersions(t *testing.T) {
	g := newGroup(t)
	p := g.start(t, command(t), "--deadline", "4s")
	last := p.ready(t)

	h3 := watch(t, g.load())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var clients sync.WaitGroup
	var asked, failed atomic.Int64
	var newest atomic.Int64
	for i := range 8 {
		c := g.tcpClient(t, i%2 == 0)
		clients.Go(func() {
			for n := uint64(0); ctx.Err() == nil; n++ {
				resp, err := getTCP(c, n, 20_000, int(n%3)*20)
				asked.Add(1)
				if err != nil {
					failed.Add(1)
					t.Errorf("request %d of client %d: %v", n, i, err)
					return
				}
				if want := 1 + (i+1)%2; resp.ProtoMajor != want {
					t.Errorf("client %d got HTTP/%d", i, resp.ProtoMajor)
				}
				if resp.Header.Get("Alt-Svc") != `h3=":4433"; ma=3600` {
					t.Errorf("Alt-Svc: %q", resp.Header.Get("Alt-Svc"))
				}
				var generation int64
				_, _ = fmt.Sscan(resp.Header.Get(HeaderGeneration), &generation)
				for old := newest.Load(); generation > old && !newest.CompareAndSwap(old, generation); old = newest.Load() {
				}
			}
		})
	}
	for range 3 {
		h3.until(t, "load by HTTP/3", func(s Sample, _ int) bool { return s.Requests[last.Generation] > 0 })
		testutil.WaitFor(t, patience, func() bool { return newest.Load() == int64(last.Generation) }, "load by TCP on generation %d", last.Generation)
		// The one before may be in its probation.
		testutil.WaitFor(t, patience, func() bool {
			if err := syscall.Kill(last.PID, syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			return p.has("started a successor", fmt.Sprintf(`"generation":%d,`, last.Generation)) || len(p.lines) > 0
		}, "an upgrade")
		last = p.ready(t)
	}
	testutil.WaitFor(t, patience, func() bool { return newest.Load() == int64(last.Generation) }, "load by TCP on the last generation")
	cancel()
	clients.Wait()
	noLoss(t, h3.stop())
	if failed.Load() > 0 || asked.Load() < 100 {
		t.Errorf("%d of %d requests over TCP failed", failed.Load(), asked.Load())
	}
	t.Logf("%d requests over TCP", asked.Load())
	if err := syscall.Kill(last.PID, syscall.SIGTERM); err != nil {
		t.Error(err)
	}
}

// A server that somebody else starts takes over from the one that runs, TCP and
// UDP together; without the control socket it is refused.
func TestTakeover(t *testing.T) {
	g := newGroup(t)
	path := command(t)
	first := g.start(t, path)
	one := first.ready(t)
	second := g.start(t, path)
	two := second.ready(t)
	if two.Generation != one.Generation+1 {
		t.Errorf("generations %d and %d", one.Generation, two.Generation)
	}
	if code := first.exit(t); code != 0 {
		t.Errorf("the predecessor exits with %d", code)
	}
	resp, err := getTCP(g.tcpClient(t, true), 1, 1000, 0)
	if err != nil {
		t.Fatal(err)
	}
	if got := resp.Header.Get(HeaderGeneration); got != fmt.Sprint(two.Generation) {
		t.Errorf("generation %s answers over TCP", got)
	}
	if s := dialTest(t, g.loader(t), false).status(t); s.Generation != two.Generation {
		t.Errorf("generation %d answers over QUIC", s.Generation)
	}
	third := g.start(t, path, "--control", "@another")
	if code := third.exit(t); code != ExitError {
		t.Errorf("exit code %d", code)
	}
	third.logged(t, "address already in use")
	second.signal(t, syscall.SIGTERM)
	if code := second.exit(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
