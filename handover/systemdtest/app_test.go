// SPDX-License-Identifier: Apache-2.0

package systemdtest

import (
	"bufio"
	"context"
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

// app is the server of app.service. It answers each line with its pid. With a file
// "broken" in its runtime directory it does not get ready.
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
	var conns sync.WaitGroup
	for name, address := range map[string]string{"https": ":443", "admin": ":9000"} {
		l, err := h.Listen(name, "tcp", address)
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
	if _, err := os.Stat(filepath.Join(filepath.Dir(control), "broken")); err == nil {
		return h.Abort(fmt.Errorf("broken on purpose"))
	}
	if err := h.Ready(stop); err != nil {
		return err
	}
	select {
	case <-h.Superseded():
	case <-stop.Done():
	}
	err = h.Close()
	conns.Wait()
	return err
}

func answer(c net.Conn) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := bufio.NewReader(c).ReadString('\n'); err == nil {
		fmt.Fprintf(c, "%d\n", os.Getpid())
	}
}
