// SPDX-License-Identifier: Apache-2.0

package systemdtest

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"instar/handover"
	"instar/internal/testutil"
)

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "app" {
		os.Exit(app())
	}
	testutil.Main(m)
}

// drainLimit is how long the server waits for a client's line.
const drainLimit = 20 * time.Second

// app is the server of app.service. To each connection it says its pid, and again
// after a line; a datagram it answers with its pid. With a file "broken" in its
// runtime directory it does not get ready.
func app() int {
	flags := flag.NewFlagSet("app", flag.ExitOnError)
	control := flags.String("control", "", "")
	probation := flags.Duration("probation", 50*time.Millisecond, "")
	_ = flags.Parse(os.Args[1:])
	if err := serve(*control, *probation); err != nil {
		fmt.Fprintln(os.Stderr, "app:", err)
		return 7
	}
	return 0
}

func serve(control string, probation time.Duration) error {
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	h, err := handover.New(handover.Options{
		Name: "app", Socket: control, Probation: probation, StoreDescriptors: true,
		Logger: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		return err
	}
	defer h.Close()
	var conns, packets sync.WaitGroup
	for _, s := range []struct{ name, network, address string }{
		{"https", "tcp", ":443"}, {"admin", "tcp", ":9000"}, {"local", "unix", ""},
	} {
		l, err := h.Listen(s.name, s.network, s.address)
		if errors.Is(err, handover.ErrNotInherited) {
			continue // no unit has it
		}
		if err != nil {
			return err
		}
		conns.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				conns.Go(func() { answer(c) })
			}
		})
	}
	var readers []net.PacketConn
	for _, s := range []struct{ name, network string }{{"udp", "udp"}, {"gram", "unixgram"}} {
		p, err := h.ListenPacket(s.name, s.network, "")
		if errors.Is(err, handover.ErrNotInherited) {
			continue
		}
		if err != nil {
			return err
		}
		defer p.Close()
		readers = append(readers, p)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(control), "broken")); err == nil {
		return h.Abort(fmt.Errorf("broken on purpose"))
	}
	if err := h.Ready(stop); err != nil {
		return err
	}
	for _, p := range readers {
		packets.Go(func() { answerPackets(p) })
	}
	select {
	case <-h.Superseded():
	case <-stop.Done():
	}
	for _, p := range readers {
		// What is read is answered; what is not is the next process's.
		_ = p.SetReadDeadline(time.Unix(1, 0))
	}
	packets.Wait()
	err = h.Close()
	conns.Wait()
	return err
}

func answer(c net.Conn) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(drainLimit))
	fmt.Fprintf(c, "%d\n", os.Getpid())
	if _, err := bufio.NewReader(c).ReadString('\n'); err == nil {
		fmt.Fprintf(c, "%d\n", os.Getpid())
	}
}

func answerPackets(p net.PacketConn) {
	buf := make([]byte, 100)
	for {
		_, from, err := p.ReadFrom(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil && from != nil {
			_, _ = fmt.Fprintf(packetWriter{p, from}, "%d\n", os.Getpid())
		}
	}
}

type packetWriter struct {
	net.PacketConn
	to net.Addr
}

func (w packetWriter) Write(b []byte) (int, error) { return w.WriteTo(b, w.to) }
