// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"instar/internal/testutil"
	"instar/quicdemo"
)

// download is a gtlsclient that downloads one large file.
type download struct {
	*running
	t    testing.TB
	file string
	size int64
	seed uint64
}

// download starts to download size bytes, which the server sends over the
// given time.
func (s *site) download(size int64, milliseconds int, args ...string) *download {
	s.t.Helper()
	client := testutil.NeedCommand(s.t, "gtlsclient", "ngtcp2-client")
	dir := s.t.TempDir()
	d := &download{t: s.t, size: size, seed: 7}
	path := fmt.Sprintf("/bytes/%d?seed=%d&ms=%d", size, d.seed, milliseconds)
	d.file = filepath.Join(dir, filepath.Base(path))
	host, port, _ := strings.Cut(address, ":")
	args = append(args, "-q", "--exit-on-all-streams-close", "--download", dir, host, port, "https://localhost"+path)
	d.running = s.start(options{}, client, args...)
	return d
}

// got is the number of bytes that arrived.
func (d *download) got() int64 {
	info, err := os.Stat(d.file)
	if err != nil {
		return 0
	}
	return info.Size()
}

// more waits until more bytes have arrived.
func (d *download) more() {
	d.t.Helper()
	d.reach(d.got() + 1)
}

// reach waits until so many bytes have arrived, and the client still runs.
func (d *download) reach(bytes int64) {
	d.t.Helper()
	testutil.WaitFor(d.t, patience, func() bool { return d.got() >= bytes || !d.alive() }, "%d bytes", bytes)
	if !d.alive() {
		d.t.Fatalf("gtlsclient ended at %d of %d bytes, before the test was through", d.got(), d.size)
	}
}

// port is the client's UDP port, of several the one that was not there before.
func (d *download) port(before ...string) string {
	d.t.Helper()
	port := ""
	testutil.WaitFor(d.t, patience, func() bool {
		f, err := os.Open(fmt.Sprintf("/proc/%d/net/udp", d.cmd.Process.Pid))
		if err != nil {
			return false
		}
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			// "sl local_address ...": address and port are hexadecimal.
			fields := strings.Fields(lines.Text())
			_, local, ok := strings.Cut(fields[1], ":")
			if ok && local != fmt.Sprintf("%04X", 4433) && !slices.Contains(before, local) {
				port = local
			}
		}
		return port != ""
	}, "a port of gtlsclient, other than %v", before)
	return port
}

// verify waits for the end of the download and compares the file.
func (d *download) verify() {
	d.t.Helper()
	if code := d.exit(); code != 0 {
		d.t.Errorf("gtlsclient exits with %d", code)
	}
	f, err := os.Open(d.file)
	if err != nil {
		d.t.Fatal(err)
	}
	defer f.Close()
	got, want := sha256.New(), sha256.New()
	n, err := io.Copy(got, f)
	if err != nil {
		d.t.Fatal(err)
	}
	if _, err := io.Copy(want, quicdemo.NewContent(d.seed, d.size)); err != nil {
		d.t.Fatal(err)
	}
	if n != d.size || string(got.Sum(nil)) != string(want.Sum(nil)) {
		d.t.Errorf("%d bytes with the SHA-256 sum %x, want %d with %x", n, got.Sum(nil), d.size, want.Sum(nil))
	}
}

// An independent client finishes a download of 100 MiB while the server
// replaces itself three times, whatever the client does to its connection.
func TestDownloadAcrossUpgrades(t *testing.T) {
	testutil.NeedRoot(t)
	testutil.NeedCommand(t, "gtlsclient", "ngtcp2-client")
	for name, tc := range map[string]struct {
		args []string
		// early upgrades the server before the request is sent.
		early bool
		moves bool
	}{
		"stays":    {},
		"migrates": {args: []string{"--change-local-addr=700ms"}, moves: true},
		// The server learns of a NAT that forgot from the client's next packet, and
		// one that only receives sends none. So the request is that packet, and it
		// comes from a port that no generation knows, after an upgrade.
		"is behind a NAT": {args: []string{"--change-local-addr=2s", "--nat-rebinding", "--delay-stream=3s"}, early: true, moves: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSite(t, "quicdemo")
			grace := "200ms"
			if tc.early {
				grace = "5s" // a client that was told to go makes no request
			}
			p := s.serve(nil, "--handshake-grace", grace)
			one := p.now.Generation
			d := s.download(100<<20, 5000, tc.args...)
			port := d.port()
			if tc.early {
				testutil.WaitFor(t, patience, func() bool { return s.received(one) >= 3 }, "the handshake")
				p.upgrade()
			} else {
				d.more()
			}
			if tc.moves {
				t.Logf("moved from port %s to %s at %d bytes", port, d.port(port), d.got())
				d.more()
			}
			for i := range int64(3) {
				d.reach(d.size * (i + 1) / 5)
				p.upgrade()
				d.more()
			}
			t.Logf("generation %d is active at %d of %d bytes", p.now.Generation, d.got(), d.size)
			d.verify()
			// The first one was there for this client alone.
			if code := p.exit(); code != 0 {
				t.Errorf("the first generation exits with %d", code)
			}
			// What is new goes to the last one.
			before := s.received(p.now.Generation)
			s.download(1<<20, 0).verify()
			if after := s.received(p.now.Generation); after <= before {
				t.Errorf("the last generation got %d packets before a new client and %d after", before, after)
			}
		})
	}
}

// An independent client resumes a session of one generation on the next one,
// and its request in early data is answered there.
func TestResumeAcrossUpgrade(t *testing.T) {
	client := testutil.NeedCommand(t, "gtlsclient", "ngtcp2-client")
	s := newSite(t, "quicdemo")
	p := s.serve(nil, "--handshake-grace", "200ms")
	dir := t.TempDir()
	host, port, _ := strings.Cut(address, ":")
	const (
		early  = "frm tx 0 0RTT STREAM(0x0b) id=0x0 "
		answer = "[instar-generation: %d]"
	)
	for visit := range 2 {
		if visit > 0 {
			p.upgrade()
		}
		var (
			mu     sync.Mutex
			output strings.Builder
		)
		keep := func(line string) {
			mu.Lock()
			defer mu.Unlock()
			output.WriteString(line)
		}
		ended := s.start(options{stdout: keep, stderr: keep}, client, "--session-file="+filepath.Join(dir, "session"), "--tp-file="+filepath.Join(dir, "parameters"),
			"--no-quic-dump", "--no-http-dump", "--exit-on-all-streams-close", host, port, "https://localhost/status")
		if code := ended.exit(); code != 0 {
			t.Fatalf("visit %d: gtlsclient exits with %d", visit, code)
		}
		ended.flush()
		if want := fmt.Sprintf(answer, p.now.Generation); !strings.Contains(output.String(), want) {
			t.Errorf("visit %d: no %q in the answer\n%s", visit, want, &output)
		}
		if got := strings.Contains(output.String(), early); got != (visit > 0) {
			t.Errorf("visit %d: request in early data: %t", visit, got)
		}
		if strings.Contains(output.String(), "rejected") {
			t.Errorf("visit %d: early data is rejected\n%s", visit, &output)
		}
	}
}
